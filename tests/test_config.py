"""Options are checked, by name and with the accepted values, before anything is touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from zinf_fx.config import PRESETS, Config, Placement, parse_bytes
from zinf_fx.errors import ConfigError
from zinf_fx.plan.codec import encode

REFUSED = {
    "unknown option": ({"stor": "/tmp"}, "unknown option 'stor'; accepted: store, placement"),
    "unknown preset": ({"placement": "infinity"}, "'infinity' is unknown; accepted: 'auto', 'device'"),
    "unknown state": ({"placement": {"weights": "nvme"}}, "unknown state 'weights'; accepted: parameters"),
    "unknown tier": ({"placement": {"parameters": "disk"}}, "parameters is 'disk'; accepted: device, host, nvme"),
    "activations nowhere": ({"placement": {"activations": "swap"}}, "accepted: device, host, nvme"),
    "placement of a wrong type": ({"placement": 3}, "neither a preset's name nor a mapping"),
    "budget without a unit known": ({"device_memory": "4 gigs"}, "'4 gigs' is not a size"),
    "negative budget": ({"host_memory": -1}, "-1 is not a size"),
    "boolean budget": ({"host_memory": True}, "True is not a size"),
    "budget beyond any memory": ({"host_memory": 2**63}, "a number beyond 2^63 is not a size"),
    "budget of endless digits": ({"host_memory": "9" * 5000}, "host_memory='999"),
    "budget below a byte": ({"host_memory": "0.5"}, "'0.5' is not a size"),
    "stage as a float": ({"placement": {"stage": 2.0}}, "placement has stage 2.0; accepted: 0, 1, 2, 3"),
    "prefetch of two": ({"prefetch": (1, 2)}, "three distances"),
    "falling prefetch": ({"prefetch": (3, 2, 1)}, "must not fall"),
    "tiny chunk": ({"chunk": 4096}, "the least is 64KiB"),
    "tile": ({"tile": "automatic"}, "tile='automatic' is not a size"),
    "frozen_dtype": ({"frozen_dtype": "nf3"}, "accepted: None, 'int8', 'fp8', 'fp8_block', 'nf4', 'mxfp4'"),
    "activations": ({"activations": "all"}, "accepted: 'keep', 'recompute', 'offload', 'auto', the number of layers"),
    "activations, no layers": ({"activations": 0}, "activations=0 is not accepted"),
    "activations, no number": ({"activations": True}, "activations=True is not accepted"),
    "store of a wrong type": ({"store": 3}, "is not a path"),
    "stores of a wrong type": ({"store": ["/a", 3]}, "is not a path"),
    "no store": ({"store": []}, "is not a path"),
    "one store twice": ({"store": ["/a", "/a"]}, "names a directory twice"),
    "an empty store": ({"store": ""}, "has an empty path: name each directory, such as '.'"),
    "one store empty": ({"store": ["/a", ""]}, "store=['/a', ''] has an empty path"),
    "checksum of a wrong type": ({"checksum": "crc"}, "accepted: True, False"),
    "strict_direct of a wrong type": ({"strict_direct": 1}, "accepted: True, False"),
    "no threads": ({"update_threads": 0}, "update_threads=0 is not accepted; accepted: None, a whole number from 1"),
    "threads of a wrong type": ({"update_threads": True}, "update_threads=True is not accepted"),
    "threads as a text": ({"update_threads": "4"}, "update_threads='4' is not accepted"),
    "threads without end": ({"update_threads": 1 << 62}, "a whole number from 1 to 1024"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(options, message):
    with pytest.raises(ConfigError) as error:
        Config.of(None, options)
    assert message in str(error.value) and len(str(error.value)) < 1000


@pytest.mark.parametrize(
    ("text", "size"),
    [(4096, 4096), ("4GiB", 4 << 30), ("1.5 GiB", 3 << 29), ("512MiB", 512 << 20), ("2GB", 2_000_000_000), ("7", 7)],
)
def test_sizes(text, size):
    assert parse_bytes(text, "budget") == size


def test_presets_follow_table_2_of_the_paper():
    assert [PRESETS[name].stage for name in ("dp", "zero-1", "zero-2", "zero-3")] == [0, 1, 2, 3]
    assert PRESETS["zero-offload"] == Placement("device", "host", "host", stage=2)
    assert PRESETS["infinity-cpu"] == Placement("host", "host", "host")
    assert PRESETS["infinity-nvme"] == Placement("nvme", "host", "nvme")
    assert (
        Config(placement="nvme").placement
        == Config(placement=dict.fromkeys(("parameters", "gradients", "optimizer"), "nvme")).placement
    )


def test_the_store_comes_from_the_option_then_the_environment_then_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("ZINF_STORE", raising=False)
    assert Config().store == tmp_path / "zinf_fx"
    monkeypatch.setenv("ZINF_STORE", "/mnt/elsewhere")
    assert Config().store == Path("/mnt/elsewhere")
    assert Config(store="/mnt/nvme").store == Path("/mnt/nvme")
    monkeypatch.setenv("ZINF_STORE", "/mnt/a:/mnt/b")
    assert Config().store == Config().stores == (Path("/mnt/a"), Path("/mnt/b"))
    assert Config(store=["/mnt/nvme"]).store == Path("/mnt/nvme")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Config(store="~/nvme").store == tmp_path / "nvme"
    monkeypatch.setenv("ZINF_STORE", "/mnt/a:")
    with pytest.raises(ConfigError, match="has an empty path"):
        Config()


def test_how_many_threads_update_is_no_part_of_a_plan() -> None:
    assert Config(update_threads=3).update_threads == 3
    assert encode(Config(update_threads=3)) == encode(Config())


def test_options_replace_those_of_a_configuration_and_leave_the_rest():
    base = Config(store="/mnt/nvme", placement="host")
    changed = Config.of(base, {"prefetch": None})
    assert (changed.store, changed.placement, changed.prefetch) == (base.store, base.placement, None)
    with pytest.raises(ConfigError, match="must be a zinf_fx"):
        Config.of({"placement": "host"}, {})
