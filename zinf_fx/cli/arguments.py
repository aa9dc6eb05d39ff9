"""The commands and their options, without what the commands do: that imports PyTorch, which takes seconds, and
`--help` has no use for it."""

from __future__ import annotations

import argparse
import re
from importlib.metadata import version
from pathlib import Path
from textwrap import fill
from typing import Any, NoReturn, get_args

from zinf_fx.adam import MasterForm, StateForm
from zinf_fx.arguments import did_you_mean
from zinf_fx.config import ACTIVATIONS, PRESETS, Compute, FrozenDtype, parse_count, parse_positive
from zinf_fx.native.engine import provider_names
from zinf_fx.placement import PlannedDevice
from zinf_fx.plan import hardware
from zinf_fx.plan.hardware import THIS_MACHINE

TARGET_HELP = "module:factory or path/to/file.py:factory; factory() returns (model, example_inputs)"

DEFAULT_HARDWARE = "rtx-4090"


_CHOICES = re.compile(r"invalid choice: '(.*?)' \(choose from (.*)\)", re.DOTALL)


class _Parser(argparse.ArgumentParser):
    """A parser that suggests what was meant, and refuses unknown arguments with the usage of the command."""

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]  (which has overloads)
        self, args: Any = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            known = re.findall(r"--[a-z-]+", self.format_help())
            meant = "".join(did_you_mean(option.partition("=")[0], known) for option in unknown)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")
        return options, unknown

    def error(self, message: str) -> NoReturn:
        if (refused := _CHOICES.search(message)) is not None:
            accepted = [choice.strip("' ") for choice in refused[2].split(",")]
            message += did_you_mean(refused[1], accepted)
        super().error(message)


def parser() -> argparse.ArgumentParser:
    """What reads the command line; `command` of the result is the name of the command."""
    made = _Parser(
        prog="zinf-fx",
        description="Plans of models whose states live in device memory, host memory and NVMe; their checkpoints; and "
        "the store on disk.",
        epilog="`zinf-fx COMMAND --help` explains a command, with examples. docs/using.md is about all of them.",
    )
    made.add_argument("--version", action="version", version=f"%(prog)s {version('zinf_fx')}")
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    for add in (_show_schedule, _export_plan, _simulate, _estimate, _checkpoint, _bench_io, _doctor, _clean):
        add(commands)
    return made


def _command(
    commands: argparse._SubParsersAction, name: str, synopsis: str, help: str, description: str, *examples: str
) -> argparse.ArgumentParser:
    """A parser whose help ends with examples. `synopsis`: what follows the name in the line of its usage."""
    return commands.add_parser(
        name,
        usage=f"zinf-fx {name} {synopsis}",
        help=help,
        description=fill(description, 80),
        epilog="\n  ".join(["examples:", *(f"zinf-fx {name} {example}" for example in examples)]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _accepted_hardware() -> str:
    return f"{', '.join(hardware.names())}, a file NAME.toml, or {THIS_MACHINE}, measured in some seconds"


def _show_schedule(commands: argparse._SubParsersAction) -> None:
    parser = _command(
        commands,
        "show-schedule",
        "[OPTION ...] TARGET",
        "what computes and what moves, operator by operator",
        "Prints the plan of a model: what each operator computes, and which tiles are waited for, "
        "all-gathered, uploaded, fetched and released meanwhile. Charts below each table show its memory from "
        "operator to operator: the tiles and gradients in flight, on the device and still in host memory, against "
        "--device-memory, and what the host arena holds, against --host-memory. Needs no store, and no memory for the "
        "model. As chrome (for ui.perfetto.dev) and html, a page by itself, it is a timeline of a simulated step.",
        "examples/gpt.py:small --placement infinity-nvme",
        "examples/gpt.py:small --placement infinity-nvme --operators 0:10",
        "examples/gpt.py:small --placement nvme --format html -o step.html",
    )
    parser.add_argument("target", metavar="TARGET", help=f"{TARGET_HELP}; or a plan file")
    _add_planning(parser)
    parser.add_argument(
        "--format",
        choices=("table", "json", "dot", "chrome", "html"),
        default="table",
        help="what to print (default: table)",
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="write to a file instead of printing")
    parser.add_argument("--operators", metavar="A:B", help="table and dot: operators A to B - 1 alone")
    parser.add_argument(
        "--hardware",
        metavar="NAME",
        help=f"what --placement auto decides for, and what other choices are weighed for (default: this machine, at "
        f"nominal rates), and whose times chrome and html show (default: {DEFAULT_HARDWARE}): {_accepted_hardware()}",
    )
    parser.add_argument("--ascii", action="store_true", help="charts without block characters, as outside terminals")
    parser.add_argument("--json", dest="format", action="store_const", const="json", help="short for --format json")


def _export_plan(commands: argparse._SubParsersAction) -> None:
    parser = _command(
        commands,
        "export-plan",
        "[OPTION ...] TARGET -o FILE",
        "write a model's plan to a file, for machines that are not there",
        "Plans a model and writes the plan, as JSON, to a file, which torch.compile(model, "
        "backend='zinf', options={'plan': FILE}) then follows without planning. Needs no store, GPU or weights.",
        "examples/gpt.py:gpt_303m --placement infinity-nvme --device-memory 2GiB -o plan.json",
        "examples/gpt.py:trillion --placement infinity-nvme --world-size 512 -o trillion.json",
    )
    parser.add_argument("target", metavar="TARGET", help=TARGET_HELP)
    parser.add_argument("-o", "--output", metavar="FILE", required=True, help="the plan file to write")
    parser.add_argument(
        "--hardware",
        metavar="NAME",
        help="what --placement auto decides for, and what other choices are weighed for (default: this machine): "
        f"{_accepted_hardware()}",
    )
    _add_planning(parser)


def _simulate(commands: argparse._SubParsersAction) -> None:
    parser = _command(
        commands,
        "simulate",
        "[OPTION ...] TARGET",
        "how long a step takes on given hardware, and what it waits for",
        "Simulates a step of a plan on described hardware: its time, TFLOP/s per device, how busy each "
        "resource is, and what computing waited for. Operators take the time of their arithmetic or of the bytes that "
        "they read and write, and on this machine the time that they are measured to take; all else is moved as the "
        "plan schedules it. `show-schedule --format html` draws it.",
        "plan.json --hardware rtx-4090 --sweep batch=1,4,64",
        "examples/gpt.py:small --placement nvme --hardware this-machine",
        "examples/gpt.py:small --placement nvme --inference",
    )
    parser.add_argument("target", metavar="TARGET", help=f"{TARGET_HELP}; or a plan file")
    parser.add_argument(
        "--hardware",
        metavar="NAME",
        default=DEFAULT_HARDWARE,
        help=f"{_accepted_hardware()} (default: {DEFAULT_HARDWARE})",
    )
    parser.add_argument(
        "--sweep",
        metavar="batch=A,B",
        help="simulate other batches: computing and activations grow, the schedule stays",
    )
    parser.add_argument("--no-overlap", action="store_true", help="move nothing while something else moves or computes")
    parser.add_argument(
        "--synchronous-optimizer",
        dest="overlap",
        action="store_false",
        help="let the optimizer's step end before the next forward pass, in which it otherwise goes on",
    )
    parser.add_argument(
        "--step-in-backward",
        dest="in_backward",
        action="store_true",
        help="let the optimizer update each parameter as soon as its gradient is whole",
    )
    parser.add_argument(
        "--accumulate",
        metavar="N",
        default="1",
        help="times that a loop runs the plan, adding gradients, before the optimizer's step (default: 1)",
    )
    _add_saving(parser)
    parser.add_argument("--json", action="store_true", help="print the figures, and the timeline, as JSON")
    _add_planning(parser)


def _add_saving(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--save-every",
        metavar="MINUTES",
        default="30",
        help="between two checkpoints, for what these cost (default: 30)",
    )
    parser.add_argument("--keep", metavar="N", default="3", help="checkpoints that stay on disk (default: 3)")


def saving_of(options: argparse.Namespace) -> dict[str, Any]:
    """How often checkpoints are saved, in seconds, and how many are kept. Raises: ConfigError."""
    minutes = parse_positive(options.save_every, "save-every")
    return {"every": 60 * minutes, "kept": parse_count(options.keep, "keep")}


def _estimate(commands: argparse._SubParsersAction) -> None:
    parser = _command(
        commands,
        "estimate",
        "[OPTION ...] [TARGET]",
        "what training a model takes: memory, bandwidth, time, wear",
        "Plans training with Adam for each placement, and simulates a step: the memory of each state, which placement "
        "is the first to fit, the bandwidth that an efficiency takes, the time of a step, what checkpoints on disk "
        "cost, and how fast the disks wear. The model is a TARGET, or a Transformer of given dimensions.",
        "--layers 80 --hidden 8192 --heads 64 --batch 1 --sequence 2048 --nodes 4",
        "--layers 80 --hidden 8192 --heads 64 --batch 1 --sequence 2048 --lora 16 --frozen nf4 --hardware rtx-4090",
        "examples/gpt.py:gpt_303m --hardware this-machine",
    )
    parser.add_argument("target", metavar="TARGET", nargs="?", help=TARGET_HELP + "; the inputs are one device's")
    model = parser.add_argument_group("a Transformer")
    model.add_argument("--layers", metavar="N", help="blocks")
    model.add_argument("--hidden", metavar="N", help="hidden size")
    model.add_argument("--heads", metavar="N", help="attention heads")
    model.add_argument("--batch", metavar="N", help="sequences per device")
    model.add_argument("--sequence", metavar="N", help="tokens per sequence")
    model.add_argument("--checkpoint-interval", metavar="N", help="blocks per activation checkpoint (default: 1)")
    model.add_argument("--dtype", choices=hardware.DTYPES, help="of parameters (default: the hardware's 16-bit one)")
    model.add_argument("--lora", metavar="RANK", help="train adapters of this rank in fp32, and freeze all else")
    parser.add_argument("--frozen", choices=get_args(FrozenDtype), help="format of what is frozen (default: as it is)")
    parser.add_argument(
        "--optimizer-bytes",
        metavar="N",
        help="bytes of optimizer states per parameter, in place of Adam's (12, or 8 for fp32; ZeRO-Infinity counts 16)",
    )
    _add_states(parser)
    cluster = parser.add_argument_group("hardware")
    cluster.add_argument(
        "--hardware",
        metavar="NAME",
        default="dgx-2",
        help=f"{', '.join(hardware.names())}, a TOML file, or {THIS_MACHINE}, which is measured; default: dgx-2",
    )
    cluster.add_argument("--store", metavar="DIR", type=Path, help=f"the disk of {THIS_MACHINE}; default: Config()'s")
    cluster.add_argument("--nodes", metavar="N", help="nodes; this and all below replace what the description says")
    cluster.add_argument("--gpus-per-node", metavar="N", help="devices of a node")
    cluster.add_argument("--device-memory", metavar="SIZE", help="of one device, such as 80GiB")
    cluster.add_argument("--host-memory", metavar="SIZE", help="of one node, such as 2TiB")
    cluster.add_argument("--nvme", metavar="SIZE", help="capacity of one node, such as 30TB")
    cluster.add_argument("--nvme-bandwidth", metavar="RATE", help="of one node: RATE, or READ,WRITE, such as 25GB/s")
    cluster.add_argument("--host-bandwidth", metavar="RATE", help="between host memory and each device, such as 3GB/s")
    cluster.add_argument("--link-bandwidth", metavar="RATE", help="bandwidth that a collective of all devices sees")
    cluster.add_argument("--peak", metavar="TFLOPS", help="TFLOP/s that a device achieves when it waits for nothing")
    cluster.add_argument("--endurance", metavar="SIZE", help="bytes that a node's drives may be written, such as 1.2PB")
    parser.add_argument(
        "--placement", metavar="PRESET", help="a preset, such as zero-3 or infinity-nvme; default: the first to fit"
    )
    parser.add_argument(
        "--efficiency",
        metavar="E",
        nargs="+",
        default=["0.5", "0.9"],
        help="shares of the peak to give the needed bandwidths for (default: 0.5 0.9)",
    )
    _add_saving(parser)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, in bytes and seconds")


def _checkpoint(commands: argparse._SubParsersAction) -> None:
    parser = _command(
        commands,
        "checkpoint",
        "ACTION DIR [OPTION ...]",
        "what checkpoints there are, what is in them, and whether they are whole",
        "Looks at checkpoints that save_checkpoint() or a CheckpointManager wrote. Needs neither the model "
        "nor memory for it.",
        "list runs/gpt",
        "verify runs/gpt",
        "convert runs/gpt/step-00002000 -o weights",
    )
    actions = parser.add_subparsers(prog="zinf-fx checkpoint", dest="action", required=True, metavar="ACTION")
    any_number = "a checkpoint, or a directory with several"
    for action, what, help_ in (
        ("list", any_number, "the checkpoints, from the oldest to the newest"),
        ("inspect", "a checkpoint", "what is in one: its parts, plain values and files"),
        ("verify", any_number, "read all bytes and compare them with their checksums; exit code 1 when any differ"),
        ("convert", "a checkpoint", "write one as safetensors files, or for torch.distributed.checkpoint"),
    ):
        added = actions.add_parser(action, help=help_, description=f"{help_[0].upper()}{help_[1:]}.")
        added.add_argument("directory", metavar="DIR", type=Path, help=what)
        if action == "inspect":
            added.add_argument("--tensors", action="store_true", help="each tensor, with its dtype, shape and bytes")
        if action == "convert":
            added.add_argument("-o", "--output", metavar="DIR", type=Path, required=True, help="where to write")
            added.add_argument(
                "--format",
                choices=("safetensors", "dcp"),
                default="safetensors",
                help="safetensors files with whole tensors (default), or a directory for torch.distributed.checkpoint",
            )
            added.add_argument(
                "--part",
                metavar="NAME",
                help="the part to write, as `inspect` lists them (default: model; with dcp, all models and optimizers)",
            )
            added.add_argument(
                "--max-shard-size",
                default="5GB",
                metavar="SIZE",
                help="bytes that a safetensors file has at most (default: 5GB)",
            )
        added.add_argument("--json", action="store_true", help="print as JSON")


def _bench_io(commands: argparse._SubParsersAction) -> None:
    parser = _command(
        commands,
        "bench-io",
        "[OPTION ...] DIR [DIR ...]",
        "measure what the engine moves in a directory",
        "Measures sequential reads, writes, and both at a time, for each I/O provider and shape, beside "
        "fio where that is installed, and stores the best as the profile of the file system.",
        "/mnt/nvme",
        "/mnt/nvme0 /mnt/nvme1 --size 4GiB",
    )
    parser.add_argument("directories", metavar="DIR", nargs="+", type=Path, help="where a store would be")
    parser.add_argument(
        "--size", default="1GiB", help="bytes of a measurement (default: 1GiB); as much space is needed"
    )
    parser.add_argument("--rounds", type=int, default=3, help="measurements, of which the median counts (default: 3)")
    parser.add_argument(
        "--provider",
        choices=("all", *provider_names()),
        default="all",
        help="how to ask for I/O (default: all, in turn)",
    )
    parser.add_argument("--no-store", action="store_true", help="don't store the profile")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def _doctor(commands: argparse._SubParsersAction) -> None:
    parser = _command(
        commands,
        "doctor",
        "[--json] [DIR ...]",
        "what of this machine helps or hinders a store and an optimizer",
        "Looks at processors, the system's limits and a store directory, and says which line fixes each problem. "
        "Exit code 1 when a store can't work like this.",
        "/mnt/nvme",
    )
    parser.add_argument("directories", metavar="DIR", nargs="*", type=Path, help="the store; default: that of Config()")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def _clean(commands: argparse._SubParsersAction) -> None:
    parser = _command(
        commands,
        "clean",
        "[DIR ...]",
        "give back what dead jobs left on the disk",
        "Removes the scratch directories that jobs left behind when they were killed, and frees what is in "
        "no checkpoint of the files that such a job shared with its checkpoints. What running jobs have is locked and "
        "stays, and so does everything else.",
        "/mnt/nvme",
        "/mnt/nvme runs/gpt",
    )
    what = "stores, and directories with checkpoints; default: the store of Config()"
    parser.add_argument("directories", metavar="DIR", nargs="*", type=Path, help=what)


def _add_planning(parser: argparse.ArgumentParser) -> None:
    """The options that decide what a plan is."""
    moves = parser.add_argument_group("where states live and how they move")
    moves.add_argument(
        "--placement",
        help=f"auto (default), {', '.join(PRESETS)}, or parameters=nvme,gradients=host; by patterns of names, as "
        "'parameters=*lora*:device;*:nvme'",
    )
    moves.add_argument("--prefetch", metavar="A,U,F", help="operators ahead: all-gather, upload, fetch; or none")
    moves.add_argument("--no-residency", action="store_true", help="move tiles for every use, whatever room there is")
    moves.add_argument(
        "--frozen-dtype",
        help=f"format of frozen matrices (default: as they are): {', '.join(get_args(FrozenDtype))}; by patterns of "
        "names, as 'lm_head.*:none;*:nf4'",
    )
    _add_states(moves)
    memory = parser.add_argument_group("memory")
    memory.add_argument("--device-memory", metavar="SIZE", help="budget of the device, such as 4GiB")
    memory.add_argument("--host-memory", metavar="SIZE", help="budget of the host tier, such as 16GiB")
    memory.add_argument("--tile", metavar="SIZE", help="largest tile, such as 64MiB; auto (default), or none")
    memory.add_argument("--pack", metavar="SIZE", help="largest pack of small parameters; auto (default), or none")
    memory.add_argument(
        "--activations",
        metavar="POLICY",
        help=f"{', '.join(ACTIVATIONS)}, or a number of layers between two checkpoints (default: keep)",
    )
    planned = parser.add_argument_group("what is planned")
    planned.add_argument("--inference", action="store_true", help="plan a call under torch.no_grad()")
    planned.add_argument(
        "--device",
        choices=get_args(PlannedDevice),
        help="what computes, which need not be here: cuda has memory of its own (default: what --hardware has, or else "
        "the device of the model; of one on the meta device, cpu)",
    )
    planned.add_argument(
        "--micro-batches",
        metavar="N",
        help="divide the batch of the example inputs into N equal parts, all of which run an operator before the next "
        "operator begins; auto: as few as fit and are simulated to take about the least time (default: 1)",
    )
    planned.add_argument(
        "--micro-batch-group",
        metavar="N",
        help="with --micro-batches: a part runs N operators before the next part does; auto: groups of operators that "
        "end where least is handed on (default: 1)",
    )
    planned.add_argument(
        "--world-size", type=int, default=1, metavar="N", help="ranks that train together (default: 1)"
    )
    planned.add_argument(
        "--replicas",
        type=int,
        default=1,
        metavar="M",
        help="groups of these ranks, each with a copy of the model (default: 1)",
    )
    planned.add_argument(
        "--compute",
        choices=get_args(Compute),
        help="what computes an operator: PyTorch's kernels one by one (eager), or one that Inductor makes (inductor); "
        "default: Inductor on a GPU",
    )
    parser.add_argument("--traceback", action="store_true", help="show where an error comes from")


def _add_states(parser: argparse._ActionsContainer) -> None:
    """What the optimizer keeps its states in."""
    parser.add_argument("--state-dtype", choices=get_args(StateForm), help="of Adam's moments (default: float32)")
    parser.add_argument(
        "--master-dtype", choices=get_args(MasterForm), help="of the masters of bf16 parameters (default: float32)"
    )
