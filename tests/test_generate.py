"""`generate()` of transformers over models in the store: the text of models in memory, a bounded number of graphs, and
per token the bytes of the plan."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import transformers
from followed import followed_plans
from gate import slow
from torch import Tensor, nn
from versions import not_before_2_12

import zinf_fx
from zinf_fx.errors import ConfigError
from zinf_fx.frontend.backend import zinf
from zinf_fx.frontend.capture import Capture
from zinf_fx.plan.memory.accounting import Traffic, phases
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.schedule import PROLOGUE
from zinf_fx.runtime.execute.executor import EXECUTOR

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

VOCABULARY, NEW = 64, 5
TOKENS = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
LAYERS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "num_hidden_layers": 1}
SHAPE = {**TOKENS, **LAYERS, "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64}


def _llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))


def _qwen2() -> nn.Module:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SHAPE))


def _mixtral() -> nn.Module:
    config = transformers.MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2)
    return transformers.MixtralForCausalLM(config)


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(**TOKENS, vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=1, n_head=2)
    return transformers.GPT2LMHeadModel(config)


def _t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, decoder_start_token_id=0,
        pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


MODES: dict[str, dict[str, object]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 10},
    "beams": {"do_sample": False, "num_beams": 3},
}


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Return the plans of all graphs that are compiled from now on."""
    plans: list[Plan] = []
    compile_graph = Capture.compile

    def noted(self: Capture) -> Callable:
        compiled = compile_graph(self)
        plans.extend([self.plan] if self.plan is not None else [])
        return compiled

    monkeypatch.setattr(Capture, "compile", noted)
    return plans


@pytest.fixture(autouse=True)
def nothing_expected() -> Iterator[None]:
    yield
    EXECUTOR.reset()


def _twins(build: Callable[[], nn.Module], **fields: object) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = build().eval()
    return plain, zinf_fx.offload(copy.deepcopy(plain), **{"placement": "nvme", **fields})


def _prompt(batch: int, length: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(length))


def _text(model: nn.Module, prompt: Tensor, new: int = NEW, **options: object) -> Tensor:
    torch.manual_seed(1)
    mask = torch.ones_like(prompt)
    return model.generate(prompt, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, **options)


def _is_inference(plan: Plan) -> bool:
    """Return whether a plan has room and traffic for parameters alone."""
    return [kind for kind, _ in phases(plan)] == ["inference"] and not plan.gradient_buffer and not plan.regions.chunks


SHAPES = ((1, 5), (1, 9), (2, 7), (3, 11))
# Of each kind of model, so many graphs serve all modes and shapes: Dynamo makes others for a prompt and for what
# follows it, for one text and for several, for a cache of one token, and before it takes a size for a symbol.
GRAPHS = [
    (_llama, None, SHAPES[2:3], 3),
    *(slow(build, None, SHAPES, 6) for build in (_llama, _qwen2, _mixtral, _gpt2)),
    *(slow(build, True, SHAPES, 4) for build in (_llama, _mixtral)),
    slow(_t5, None, SHAPES, 9),
    slow(_t5, True, SHAPES, 6),
]


@not_before_2_12("torch.compile takes no recompile_limit")
@pytest.mark.parametrize(("build", "dynamic", "shapes", "most"), GRAPHS)
def test_a_bounded_number_of_graphs_generates_what_the_model_in_memory_does(
    build: Callable[[], nn.Module],
    dynamic: bool | None,
    shapes: tuple[tuple[int, int], ...],
    most: int,
    tmp_path: Path,
    graphs: list[Plan],
):
    plain, model = _twins(build, store=tmp_path)
    model.compile(backend="zinf", dynamic=dynamic, recompile_limit=most)
    for shape in shapes:
        prompt = _prompt(*shape)
        for mode, options in MODES.items():
            assert torch.equal(_text(model, prompt, **options), _text(plain, prompt, **options)), (mode, shape)
    assert 0 < len(graphs) <= most and all(map(_is_inference, graphs))
    assert zinf_fx.stats(model).gathered_bytes > 0


@pytest.mark.slow
@pytest.mark.parametrize("build", [_llama, _mixtral, _t5])
@pytest.mark.parametrize("by_generate", [False, True])
def test_static_caches(build: Callable[[], nn.Module], by_generate: bool, tmp_path: Path, graphs: list[Plan]):
    plain, model = _twins(build, store=tmp_path)
    options: dict[str, object] = {"cache_implementation": "static", **MODES["greedy"]}
    expected = {shape: _text(plain, _prompt(*shape), **options) for shape in SHAPES}
    if by_generate:  # which compiles what follows the prompt, on devices other than the CPU without being told
        options["compile_config"] = config = transformers.CompileConfig(backend="zinf", mode=None)
        config._compile_all_devices = True
    else:
        model.compile(backend="zinf")
    for shape, text in expected.items():
        assert torch.equal(_text(model, _prompt(*shape), **options), text), shape
    assert 0 < len(graphs) <= 6 and all(map(_is_inference, graphs))


def _bytes_read(model: nn.Module) -> int:
    """Once no read is under way."""
    before = None
    while before != (before := zinf_fx.stats(model).bytes_read):
        time.sleep(0.05)
    return before


@pytest.mark.parametrize(
    ("options", "share"),
    [
        ({"host_memory": "288KiB"}, (0.1, 0.9)),
        slow({"residency": False}, (1.0, 1.1)),
        slow({"host_memory": "4MiB"}, (0, 0)),
        slow({"host_memory": "288KiB", "tile": "16KiB"}, (0.1, 0.9)),
    ],
)
def test_each_token_reads_what_its_plan_says(options: dict[str, object], share: tuple[float, float], tmp_path: Path):
    plain, model = _twins(
        lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**SHAPE | {"hidden_size": 64, "intermediate_size": 192, "vocab_size": 256})
        ),
        store=tmp_path,
        pack="16KiB",
        **options,
    )
    model.compile(backend="zinf", dynamic=True)
    prompt = _prompt(2, 7)
    expected = _text(plain, prompt, **MODES["greedy"])
    _text(model, prompt, **MODES["greedy"])
    with followed_plans(model) as plans:
        assert torch.equal(_text(model, prompt, **MODES["greedy"]), expected)
    first, rest = plans
    planned = sum((traffic for _, traffic in phases(rest)), Traffic()).nvme_to_host
    stored = sum(parameter.nbytes for parameter in plain.parameters())
    assert share[0] * stored <= planned <= share[1] * stored
    assert first.moves_as(rest)  # so that what stays in memory does from prompt to token, and to the next prompt
    before = _bytes_read(model)
    for new in (NEW, 2 * NEW):
        _text(model, prompt, new, **MODES["greedy"])
    assert _bytes_read(model) - before == 3 * NEW * planned
    # What the next call begins with has been read before it, and takes the place that is planned for it.
    (graph,) = rest.graphs
    ahead = {e.tile for e in graph.events if e.kind == "fetch" and e.operator == PROLOGUE and not e.resident}
    stats = zinf_fx.stats(model)
    assert stats.host_bytes >= sum(graph.tiles[tile].nbytes for tile in ahead)
    assert ahead or not planned or "tile" in options  # of which those that come first stay
    assert stats.displaced_buffers == 0


@pytest.mark.slow
def test_what_stays_of_one_model_goes_when_its_twin_generates(tmp_path: Path):
    prompt = _prompt(2, 7)
    (plain, model), (_, twin) = (_twins(_llama, store=tmp_path, host_memory="4MiB") for _ in range(2))
    for net in (model, twin):
        net.compile(backend="zinf", dynamic=True)
    with torch.no_grad():
        held = []
        for net in (model, twin, model, twin):
            assert torch.equal(net(prompt).logits, plain(prompt).logits)
            held.append(zinf_fx.stats(net).host_bytes)  # of both, which share their memory
    assert held[0] > 0 and len(set(held)) == 1


@pytest.mark.parametrize(
    ("placement", "mode"),
    [
        slow("infinity-nvme", torch.no_grad),  # in the gate, test_executor_semantics evaluates between steps
        *(slow(p, torch.inference_mode) for p in ("infinity-nvme", "host", "device")),
    ],
)
def test_training_and_generating_take_turns(placement: str, mode: type, tmp_path: Path):
    plain, model = _twins(_llama, store=tmp_path, placement=placement)
    optimizers = [torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)]
    optimizers += [zinf_fx.optim.AdamW(model.parameters(), lr=1e-2)]
    model.compile(backend="zinf")
    prompt = _prompt(2, 7)
    for _ in range(3):
        texts, losses = [], []
        for net, optimizer in zip((plain, model), optimizers, strict=True):
            with mode():
                texts.append(_text(net.eval(), prompt, 2, **MODES["greedy"]))
            loss = net.train()(input_ids=prompt, labels=prompt).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert torch.equal(*texts) and losses[0] == losses[1]
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter.full_tensor(), other), name


@pytest.mark.parametrize("build", [_gpt2, *map(slow, (_llama, _qwen2, _mixtral, _t5))])
def test_generation_without_a_compiler(build: Callable[[], nn.Module], tmp_path: Path, caplog, recwarn):
    plain, model = _twins(build, store=tmp_path)
    for mode, options in MODES.items():
        prompt = _prompt(2, 5)
        assert torch.equal(_text(model, prompt, **options), _text(plain, prompt, **options)), mode
    assert not [record for record in caplog.records if record.name.startswith("zinf_fx")]
    said = [str(warning.message) for warning in recwarn if "zinf" in str(warning.message)]
    assert len(said) == 1 and said[0].startswith("eager code computes with parameters that are stored")


def test_what_a_library_gives_besides_options_is_refused_by_its_name():
    with pytest.raises(ConfigError, match=r"found mode='reduce-overhead': leave it out, or give None"):
        zinf(torch.fx.GraphModule({}, torch.fx.Graph()), [], mode="reduce-overhead")
