"""Transfers under way, and what a job's transfers count."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, TypeVar

from zinf_fx.errors import StoreError
from zinf_fx.interrupts import sealed


class Ticket(Protocol):
    """A transfer under way."""

    def done(self) -> bool:
        """Whether it is over."""
        ...

    def wait(self) -> None:
        """Returns when it is over."""


T = TypeVar("T", bound=Ticket)


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class JoinedTicket:
    """Several transfers under way, as one."""

    tickets: Sequence[Ticket]

    def done(self) -> bool:
        """Whether all are over, well or not."""
        return all(ticket.done() for ticket in self.tickets)

    def wait(self) -> None:
        """Returns when all bytes are there. Raises: StoreError of the first that failed, after all have ended."""
        failure: StoreError | None = None
        for ticket in self.tickets:
            try:
                ticket.wait()
            except StoreError as error:
                failure = failure or error
        if failure is not None:
            raise failure


def all_started(starting: Iterable[T]) -> list[T]:
    """The transfers that are started one after the other. Where one can't be, those before it have ended when that is
    raised: who asked for them gives back what they move."""
    tickets: list[T] = []
    try:
        for ticket in starting:
            tickets.append(ticket)
    except BaseException:
        for ticket in tickets:
            with sealed, suppress(StoreError):
                ticket.wait()
        raise
    return tickets


def joined(tickets: Sequence[Ticket]) -> Ticket:
    """Transfers as one."""
    return tickets[0] if len(tickets) == 1 else JoinedTicket(tickets)


@dataclass
class Counters:
    """What moved, in bytes, and what was waited for, in seconds, since the job began; and how many buffers lay where
    their plans said, and how many did not."""

    gathered_bytes: int = 0
    stall_seconds: float = 0.0
    write_stall_seconds: float = 0.0
    placed: int = 0
    displaced: int = 0
