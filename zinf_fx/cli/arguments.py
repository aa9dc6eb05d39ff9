"""The commands and their options, without what the commands do: that imports PyTorch, which takes seconds, and
`--help` has no use for it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, get_args

from zinf_fx.adam import MasterForm, StateForm
from zinf_fx.config import ACTIVATIONS, PRESETS, Compute, FrozenDtype, parse_count, parse_positive
from zinf_fx.native.engine import provider_names
from zinf_fx.plan import hardware

TARGET_HELP = "module:factory or path/to/file.py:factory; factory() returns (model, example_inputs)"

THIS_MACHINE = "this-machine"
DEFAULT_HARDWARE = "rtx-4090"


def parser() -> argparse.ArgumentParser:
    """What reads the command line; `command` of the result is the name of the command."""
    made = argparse.ArgumentParser(
        prog="zinf-fx", description="Plans of models whose states live in device memory, host memory and NVMe."
    )
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (_show_schedule, _export_plan, _simulate, _estimate, _checkpoint, _bench_io, _doctor, _clean):
        add(commands)
    return made


def _accepted_hardware() -> str:
    return f"{', '.join(hardware.names())}, a file NAME.toml, or {THIS_MACHINE}, measured in some seconds"


def _show_schedule(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "show-schedule",
        help="what computes and what moves, operator by operator",
        description="Prints the plan of a model: what each operator computes, and which tiles are waited for, "
        "all-gathered, uploaded, fetched and released meanwhile. Charts below each table show its memory from "
        "operator to operator: the tiles and gradients in flight, on the device and still in host memory, against "
        "--device-memory, and what the host arena holds, against --host-memory. Needs no store, and no memory for the "
        "model. As chrome (for ui.perfetto.dev) and html, a page by itself, it is a timeline of a simulated step.",
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
    parser.add_argument("--operators", metavar="A:B", help="table, dot: operators A to B - 1 only")
    parser.add_argument(
        "--hardware",
        metavar="NAME",
        help=f"what --placement auto decides for (default: this machine, at nominal rates), and whose times chrome and "
        f"html show (default: {DEFAULT_HARDWARE}): {_accepted_hardware()}",
    )
    parser.add_argument("--ascii", action="store_true", help="charts without block characters, as outside terminals")
    parser.add_argument("--json", dest="format", action="store_const", const="json", help="short for --format json")


def _export_plan(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "export-plan",
        help="write a model's plan to a file, for machines that are not there",
        description="Plans a model and writes the plan, as JSON, to a file, which torch.compile(model, "
        "backend='zinf', options={'plan': FILE}) then follows without planning. Needs no store, GPU or weights.",
    )
    parser.add_argument("target", metavar="TARGET", help=TARGET_HELP)
    parser.add_argument("-o", "--output", metavar="FILE", required=True, help="the plan file to write")
    parser.add_argument(
        "--hardware",
        metavar="NAME",
        help="what --placement auto decides for, and --activations auto weighs with: "
        f"{', '.join(hardware.names())}, or a file NAME.toml",
    )
    _add_planning(parser)


def _simulate(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "simulate",
        help="how long a step takes on given hardware, and what it waits for",
        description="Simulates a step of a plan on described hardware: its time, TFLOP/s per device, how busy each "
        "resource is, and what computing waited for. Operators take the time of their arithmetic or of the bytes that "
        "they read and write, and on this machine the time that they are measured to take; all else is moved as the "
        "plan schedules it. `show-schedule --format html` draws it.",
    )
    parser.add_argument("target", metavar="TARGET", help=f"{TARGET_HELP}; or a plan file")
    parser.add_argument(
        "--hardware",
        metavar="NAME",
        default=DEFAULT_HARDWARE,
        help=f"{_accepted_hardware()} (default: {DEFAULT_HARDWARE})",
    )
    parser.add_argument(
        "--sweep", metavar="batch=A,B", help="other batches: computing and activations grow, the schedule stays"
    )
    parser.add_argument("--no-overlap", action="store_true", help="move nothing while something else moves or computes")
    parser.add_argument(
        "--synchronous-optimizer",
        dest="overlap",
        action="store_false",
        help="a step ends with the optimizer's, which otherwise goes on in the next forward pass",
    )
    parser.add_argument(
        "--accumulate",
        metavar="N",
        default="1",
        help="times that a loop runs the plan, adding gradients, before the optimizer's step (1)",
    )
    _add_saving(parser)
    parser.add_argument("--json", action="store_true", help="print the figures, and the timeline, as JSON")
    _add_planning(parser)


def _add_saving(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--save-every", metavar="MINUTES", default="30", help="to save a checkpoint to disk (30)")
    parser.add_argument("--keep", metavar="N", default="3", help="checkpoints that stay on disk (3)")


def saving_of(options: argparse.Namespace) -> dict[str, Any]:
    """How often checkpoints are saved, in seconds, and how many are kept. Raises: ConfigError."""
    minutes = parse_positive(options.save_every, "save-every")
    return {"every": 60 * minutes, "kept": parse_count(options.keep, "keep")}


def _estimate(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "estimate",
        help="what training a model takes: memory, bandwidth, time, wear",
        description="Estimates training with Adam from the formulas of the ZeRO and ZeRO-Infinity papers: the memory "
        "of each state, which placement is the first to fit, the bandwidth that an efficiency takes, the time of a "
        "step, what checkpoints on disk cost, and how fast the disks wear. The model is a TARGET, or a Transformer of "
        "given dimensions.",
    )
    parser.add_argument("target", metavar="TARGET", nargs="?", help=TARGET_HELP + "; the inputs are one device's")
    model = parser.add_argument_group("a Transformer")
    model.add_argument("--layers", metavar="N", help="blocks")
    model.add_argument("--hidden", metavar="N", help="hidden size")
    model.add_argument("--heads", metavar="N", help="attention heads")
    model.add_argument("--batch", metavar="N", help="sequences per device")
    model.add_argument("--sequence", metavar="N", help="tokens per sequence")
    model.add_argument("--checkpoint-interval", metavar="N", help="blocks per activation checkpoint (default 1)")
    model.add_argument("--dtype", choices=hardware.DTYPES, help="default: the hardware's 16-bit one")
    model.add_argument("--lora", metavar="RANK", help="train adapters of this rank in fp32, and freeze all else")
    parser.add_argument("--frozen", choices=get_args(FrozenDtype), help="format of what is frozen (default: as it is)")
    parser.add_argument(
        "--optimizer-bytes",
        metavar="N",
        help="states per parameter, in place of Adam's (12, of fp32 8; ZeRO-Infinity counts 16)",
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
    cluster.add_argument("--nodes", metavar="N", help="instead of the description's, as all below")
    cluster.add_argument("--gpus-per-node", metavar="N", help="devices of a node")
    cluster.add_argument("--device-memory", metavar="SIZE", help="of one device, such as 80GiB")
    cluster.add_argument("--host-memory", metavar="SIZE", help="of one node, such as 2TiB")
    cluster.add_argument("--nvme", metavar="SIZE", help="capacity of one node, such as 30TB")
    cluster.add_argument("--nvme-bandwidth", metavar="RATE", help="of one node: RATE, or READ,WRITE, such as 25GB/s")
    cluster.add_argument("--host-bandwidth", metavar="RATE", help="between host memory and each device, such as 3GB/s")
    cluster.add_argument("--link-bandwidth", metavar="RATE", help="that a collective of all devices sees")
    cluster.add_argument("--peak", metavar="TFLOPS", help="TFLOP/s that a device achieves when it waits for nothing")
    cluster.add_argument("--endurance", metavar="SIZE", help="bytes that a node's drives may be written, such as 1.2PB")
    parser.add_argument(
        "--placement", metavar="PRESET", help="a preset, such as zero-3 or infinity-nvme; default: the first to fit"
    )
    parser.add_argument(
        "--efficiency", metavar="E", nargs="+", default=["0.5", "0.9"], help="to give bandwidths for (0.5 0.9)"
    )
    _add_saving(parser)
    parser.add_argument(
        "--reproduce", action="store_true", help="print the papers' tables beside the formulas' figures"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, in bytes and seconds")


def _checkpoint(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "checkpoint",
        help="what checkpoints there are, what is in them, and whether they are whole",
        description="Looks at checkpoints that save_checkpoint() or a CheckpointManager wrote. Needs neither the model "
        "nor memory for it.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    several = "a checkpoint, or a directory with several"
    for action, what, help_ in (
        ("list", several, "the checkpoints, from the oldest to the newest"),
        ("inspect", "a checkpoint", "what is in one: its parts, plain values and files"),
        ("verify", several, "read all bytes and compare them with their checksums; exit code 1 when any differ"),
        ("convert", "a checkpoint", "write one in another format: safetensors files, or torch.distributed.checkpoint"),
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
                help="a part with whole tensors (default), or a directory of torch.distributed.checkpoint",
            )
            added.add_argument(
                "--part", metavar="NAME", help="what of it (default: model; with dcp, all models and optimizers)"
            )
            added.add_argument(
                "--max-shard-size", default="5GB", metavar="SIZE", help="bytes in a safetensors file (default: 5GB)"
            )
        added.add_argument("--json", action="store_true", help="print as JSON")


def _bench_io(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "bench-io",
        help="measure what the engine moves in a directory",
        description="Measures sequential reads, writes, and both at a time, for each I/O provider and shape, beside "
        "fio where that is installed, and stores the best as the profile of the file system.",
    )
    parser.add_argument("directories", metavar="DIR", nargs="+", type=Path, help="where a store would be")
    parser.add_argument("--size", default="1GiB", help="bytes of a measurement (default 1GiB); as much space is needed")
    parser.add_argument("--rounds", type=int, default=3, help="measurements, of which the median counts (default 3)")
    parser.add_argument("--provider", choices=("all", *provider_names()), default="all")
    parser.add_argument("--no-store", action="store_true", help="don't store the profile")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def _doctor(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "doctor",
        help="what of this machine helps or hinders a store",
        description="Looks at the system's limits and at a store directory, and says which line mends each problem. "
        "Exit code 1 when a store can't work like this.",
    )
    parser.add_argument("directories", metavar="DIR", nargs="*", type=Path, help="the store; default: that of Config()")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def _clean(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "clean",
        help="give back what dead jobs left on the disk",
        description="Removes the scratch directories that jobs left behind when they were killed, and frees what is in "
        "no checkpoint of the files that such a job shared with its checkpoints. What running jobs have is locked and "
        "stays, and so does everything else.",
    )
    what = "stores, and directories with checkpoints; default: the store of Config()"
    parser.add_argument("directories", metavar="DIR", nargs="*", type=Path, help=what)


def _add_planning(parser: argparse.ArgumentParser) -> None:
    """The options that decide what a plan is."""
    parser.add_argument(
        "--placement",
        help=f"auto (default), {', '.join(PRESETS)}, or parameters=nvme,gradients=host; by patterns of names, as "
        "'parameters=*lora*:device;*:nvme'",
    )
    parser.add_argument("--prefetch", metavar="A,U,F", help="operators ahead: all-gather, upload, fetch; or none")
    parser.add_argument("--device-memory", metavar="SIZE", help="budget of the device, such as 4GiB")
    parser.add_argument("--host-memory", metavar="SIZE", help="budget of the host tier, such as 16GiB")
    parser.add_argument("--tile", metavar="SIZE", help="largest tile, such as 64MiB; auto (default), or none")
    parser.add_argument("--pack", metavar="SIZE", help="largest pack of small parameters; auto (default), or none")
    parser.add_argument(
        "--activations",
        metavar="POLICY",
        help=f"{', '.join(ACTIVATIONS)}, or a number of layers between two checkpoints (default: keep)",
    )
    parser.add_argument(
        "--frozen-dtype", choices=get_args(FrozenDtype), help="format of frozen matrices (default: as they are)"
    )
    parser.add_argument(
        "--compute",
        choices=get_args(Compute),
        help="what computes an operator: PyTorch's kernels one by one (eager), or one that Inductor makes (inductor); "
        "default: Inductor on a GPU",
    )
    _add_states(parser)
    parser.add_argument(
        "--micro-batches",
        metavar="N",
        help="divide the batch of the example inputs into so many equal parts, which run each operator one after the "
        "other (default: 1)",
    )
    parser.add_argument(
        "--micro-batch-group",
        metavar="N",
        help="so many operators, one after the other, before the next of these parts runs them; auto: groups of them "
        "that end where least is handed on (default: 1)",
    )
    parser.add_argument("--no-residency", action="store_true", help="move tiles for every use, whatever room there is")
    parser.add_argument("--world-size", type=int, default=1, metavar="N", help="ranks that train together (default: 1)")
    parser.add_argument(
        "--replicas", type=int, default=1, metavar="M", help="groups of them, each with all of the model (default: 1)"
    )
    parser.add_argument("--inference", action="store_true", help="plan a call under torch.no_grad()")
    parser.add_argument("--traceback", action="store_true", help="show where an error comes from")


def _add_states(parser: argparse.ArgumentParser) -> None:
    """What the optimizer keeps its states in."""
    parser.add_argument("--state-dtype", choices=get_args(StateForm), help="of Adam's moments (default: float32)")
    parser.add_argument(
        "--master-dtype", choices=get_args(MasterForm), help="of the masters of bf16 parameters (default: float32)"
    )
