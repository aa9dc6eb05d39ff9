from __future__ import annotations

import gc

import pytest

from zinf_fx.cycles import no_search_for_cycles


@pytest.mark.parametrize("was_enabled", [True, False])
def test_what_was_set_before_is_set_again_behind_the_block(was_enabled: bool):
    try:
        gc.enable() if was_enabled else gc.disable()
        with pytest.raises(ZeroDivisionError), no_search_for_cycles():
            assert not gc.isenabled()
            raise ZeroDivisionError
        assert gc.isenabled() == was_enabled
    finally:
        gc.enable()
