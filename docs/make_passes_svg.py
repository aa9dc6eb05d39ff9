"""Draws docs/passes.svg: how a model becomes a schedule. Run it again after changing the passes."""

from __future__ import annotations

from pathlib import Path

WIDTH, HEIGHT = 1000, 590
INK, MUTED, LINE = "#1f2933", "#52606d", "#9aa5b1"
GRAPH, PASS, RUN = "#e3f0fb", "#f4f0e6", "#e6f4ea"


def box(x: int, y: int, w: int, h: int, title: str, text: list[str], fill: str) -> str:
    """A titled box with lines of text."""
    parts = [f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="8" fill="{fill}" stroke="{LINE}"/>']
    parts.append(f'<text x="{x + 14}" y="{y + 25}" class="t">{title}</text>')
    parts += [f'<text x="{x + 14}" y="{y + 47 + 19 * i}" class="s">{line}</text>' for i, line in enumerate(text)]
    return "\n".join(parts)


def arrow(x1: int, y1: int, x2: int, y2: int, label: str = "") -> str:
    """An arrow, with a label above its middle."""
    line = f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" class="a" marker-end="url(#m)"/>'
    middle = f'<text x="{(x1 + x2) / 2}" y="{(y1 + y2) / 2 - 7}" class="l">{label}</text>'
    return line + (middle if label else "")


def lane(y: int, name: str, cells: list[tuple[int, int, str, str]]) -> str:
    """One lane of the timeline: (start, length, text, colour) in operators."""
    unit, left = 112, 150
    parts = [f'<text x="{left - 14}" y="{y + 20}" class="r">{name}</text>']
    for start, length, text, colour in cells:
        x = left + start * unit
        parts.append(f'<rect x="{x}" y="{y}" width="{length * unit - 4}" height="28" rx="4" fill="{colour}"/>')
        parts.append(f'<text x="{x + length * unit / 2 - 2}" y="{y + 19}" class="c">{text}</text>')
    return "\n".join(parts)


def main() -> None:
    body = [
        box(
            20,
            20,
            186,
            170,
            "Your model",
            ["torch.compile(", '  model, backend="zinf")', "", "each stored parameter", "becomes a gather node"],
            GRAPH,
        ),
        box(
            260,
            20,
            210,
            170,
            "Joint graph",
            [
                "pack, tile, tile_cross_entropy",
                "keep, recompute or",
                "choose_activations",
                "recompute_gathers",
                "reduce_gradients",
                "partition",
            ],
            PASS,
        ),
        box(
            530,
            20,
            210,
            170,
            "Forward, backward",
            [
                "offload_activations",
                "regions, lower_gathers",
                "offload_gradients",
                "prefetch",
                "residency",
                "buffers",
            ],
            PASS,
        ),
        box(
            800,
            20,
            180,
            170,
            "Programs",
            ["generated Python that", "calls the runtime", "between operators;", "the Plan beside it"],
            RUN,
        ),
        arrow(206, 95, 256, 95, "capture"),
        arrow(470, 95, 526, 95),
        arrow(740, 95, 796, 95, "bind"),
        '<text x="20" y="224" class="s">The specification is checked after every pass.</text>',
        '<text x="20" y="272" class="t">While operator i computes: i+1 all-gathers, i+2 uploads, i+3 is fetched</text>',
    ]
    fetch, upload, gather, compute, leave = "#7fb2e5", "#a7cdf0", "#cfe4f7", "#8fcb9b", "#e8c27a"
    rows = 292
    body += [
        lane(rows, "NVMe → host", [(k, 1, f"fetch {k + 3}", fetch) for k in range(6)]),
        lane(rows + 42, "host → device", [(k, 1, f"upload {k + 2}", upload) for k in range(6)]),
        lane(rows + 84, "all-gather", [(k, 1, f"gather {k + 1}", gather) for k in range(6)]),
        lane(rows + 126, "compute", [(k, 1, f"operator {k}", compute) for k in range(7)]),
        lane(rows + 168, "release", [(k + 1, 1, f"tile {k} free", "#e4e7eb") for k in range(6)]),
        lane(rows + 210, "reduce-scatter", [(k + 1, 1, f"gradients {k}", leave) for k in range(6)]),
        lane(rows + 252, "offload", [(k + 2, 1, f"gradients {k}", "#f0d9ac") for k in range(5)]),
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
