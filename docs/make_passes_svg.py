"""Draws docs/passes.svg: how a model becomes a schedule. Run it again after changing the passes."""

from __future__ import annotations

from pathlib import Path

WIDTH, HEIGHT = 1000, 606
INK, MUTED, LINE = "#1f2933", "#52606d", "#9aa5b1"
GRAPH, PASS, RUN = "#e3f0fb", "#f4f0e6", "#e6f4ea"


def box(x: int, y: int, w: int, h: int, title: str, text: list[str], fill: str) -> str:
    """A titled box with lines of text."""
    parts = [f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="8" fill="{fill}" stroke="{LINE}"/>']
    parts.append(f'<text x="{x + 14}" y="{y + 25}" class="t">{title}</text>')
    parts += [f'<text x="{x + 14}" y="{y + 47 + 19 * i}" class="s">{line}</text>' for i, line in enumerate(text)]
    return "\n".join(parts)


def line(y: int, kind: str, text: str) -> str:
    """A line of text at the left; `kind`: "t", a title, or "s", smaller."""
    return f'<text x="20" y="{y}" class="{kind}">{text}</text>'


def arrow(x1: int, y1: int, x2: int, y2: int, label: str = "") -> str:
    """An arrow, with a label above its middle."""
    drawn = f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" class="a" marker-end="url(#m)"/>'
    middle = f'<text x="{(x1 + x2) / 2}" y="{(y1 + y2) / 2 - 7}" class="l">{label}</text>'
    return drawn + (middle if label else "")


def lane(y: int, name: str, cells: list[tuple[int, int, str, str]]) -> str:
    """One lane of the timeline: (start, length, text, colour) in operators."""
    unit, left = 112, 190
    parts = [f'<text x="{left - 14}" y="{y + 20}" class="r">{name}</text>']
    for start, length, text, colour in cells:
        x = left + start * unit
        parts.append(f'<rect x="{x}" y="{y}" width="{length * unit - 4}" height="28" rx="4" fill="{colour}"/>')
        parts.append(f'<text x="{x + length * unit / 2 - 2}" y="{y + 19}" class="c">{text}</text>')
    return "\n".join(parts)


def main() -> None:
    top, tall = 20, 186
    joint = [
        "pack, tile",
        "tile_cross_entropy",
        "keep_, recompute_ or",
        "choose_activations",
        "recompute_gathers",
        "reduce_gradients",
        "partition, micro-batches",
    ]
    each = [
        "offload_activations",
        "place_writes, sink_gathers",
        "multiply_quantised, regions",
        "lower_gathers",
        "offload_gradients",
        "prefetch, residency",
        "buffers",
    ]
    model = ["torch.compile(model,", 'backend="zinf")', "", "each stored parameter", "becomes a gather node"]
    programs = ["generated Python that", "calls the runtime", "between operators;", "the plan beside it"]
    body = [
        box(20, top, 190, tall, "Your model", model, GRAPH),
        box(270, top, 206, tall, "Joint graph", joint, PASS),
        box(524, top, 226, tall, "Forward, backward", each, PASS),
        box(800, top, 180, tall, "Programs", programs, RUN),
        arrow(210, 113, 266, 113, "capture"),
        arrow(476, 113, 520, 113),
        arrow(750, 113, 796, 113, "bind"),
        line(230, "s", "A box's lines are passes, and the specification is checked after each."),
        line(
            276,
            "t",
            "While operator i computes, i+1 is gathered, i+2 uploaded and i+3 fetched (time goes to the right)",
        ),
    ]
    fetch, upload, gather, compute, leave = "#7fb2e5", "#a7cdf0", "#cfe4f7", "#8fcb9b", "#e8c27a"
    rows = 292
    body += [
        lane(rows, "fetch: NVMe → host", [(k, 1, f"tile {k + 3}", fetch) for k in range(6)]),
        lane(rows + 38, "upload: host → device", [(k, 1, f"tile {k + 2}", upload) for k in range(6)]),
        lane(rows + 76, "all-gather", [(k, 1, f"tile {k + 1}", gather) for k in range(6)]),
        lane(rows + 114, "compute", [(k, 1, f"operator {k}", compute) for k in range(7)]),
        lane(rows + 152, "release", [(k + 1, 1, f"tile {k}", "#e4e7eb") for k in range(6)]),
        line(rows + 216, "t", "and in backward, the gradients of the operators before it leave"),
        lane(rows + 230, "reduce-scatter", [(k + 1, 1, f"gradients {k}", leave) for k in range(6)]),
        lane(rows + 268, "offload: → host, NVMe", [(k + 2, 1, f"gradients {k}", "#f0d9ac") for k in range(5)]),
    ]
    style = f"""
    text {{ font-family: Helvetica, Arial, sans-serif; fill: {INK}; }}
    .t {{ font-size: 15px; font-weight: bold; }} .s {{ font-size: 13.5px; fill: {MUTED}; }}
    .l {{ font-size: 12px; text-anchor: middle; fill: {MUTED}; }} .r {{ font-size: 13px; text-anchor: end; }}
    .c {{ font-size: 12.5px; text-anchor: middle; }} .a {{ stroke: {MUTED}; stroke-width: 1.6; }}"""
    marker = (
        '<defs><marker id="m" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0,0 L8,4 L0,8 z" fill="{MUTED}"/></marker></defs>'
    )
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">\n'
        f"<style>{style}\n</style>{marker}\n"
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n' + "\n".join(body) + "\n</svg>\n"
    )
    Path(__file__).with_name("passes.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
