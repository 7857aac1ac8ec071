"""The style sheet of a page: its light and its dark theme, and what lets it fit a telephone."""

# Ten colours that differ in hue or in lightness from their neighbours: a family has as many versions.
_LIGHT = ["0550ae", "cf222e", "1a7f37", "9a6700", "8250df", "0e7c86", "bf3989", "57606a", "bc4c00", "4d7c0f"]
_DARK = ["79c0ff", "ff7b72", "56d364", "e3b341", "d2a8ff", "56d4dd", "ff9bce", "b1bac4", "ffa657", "a5d64c"]


def _colours(values: list[str]) -> str:
    return "; ".join(f"--c{index}: #{value}" for index, value in enumerate(values))


_SERIES = "\n".join(f".c{index} {{ --own: var(--c{index}) }}" for index in range(len(_LIGHT)))

STYLE = f"""
:root {{ color-scheme: light dark; --paper: #ffffff; --ink: #24292f; --faint: #57606a; --grid: #d8dee4;
  --heat: 3 72 150; --bad: #cf222e; --bar: #8fbff0; {_colours(_LIGHT)} }}
@media (prefers-color-scheme: dark) {{ :root {{ --paper: #0d1117; --ink: #e6edf3; --faint: #9aa4af; --grid: #2b323b;
  --heat: 40 116 200; --bad: #ff7b72; --bar: #24598f; {_colours(_DARK)} }} }}
{_SERIES}
* {{ box-sizing: border-box }}
body {{ margin: 0 auto; padding: 16px; max-width: 1080px; background: var(--paper); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif }}
h1 {{ font-size: 22px; margin: 0 0 4px; overflow-wrap: anywhere }}
h2 {{ font-size: 18px; margin: 40px 0 2px; padding-top: 12px; border-top: 1px solid var(--grid) }}
h3 {{ font-size: 14px; margin: 18px 0 6px }}
p {{ margin: 4px 0; overflow-wrap: anywhere }} .faint, small {{ color: var(--faint) }} .bad {{ color: var(--bad) }}
.note {{ border-left: 4px solid var(--c3); padding: 4px 10px; margin: 10px 0 }}
a {{ color: var(--c0) }} code {{ font-size: 13px }}
.pair {{ display: grid; gap: 0 28px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)) }}
.pair > div {{ min-width: 0 }}
svg {{ display: block; width: 100%; max-width: 560px; font: 12px system-ui, sans-serif }}
svg text {{ fill: var(--ink) }} svg path {{ fill: none }} svg .grid {{ stroke: var(--grid) }}
svg .axis {{ stroke: var(--faint) }} svg .line {{ stroke: var(--own, var(--faint)); stroke-width: 1.8;
  stroke-linejoin: round }} svg .dashed {{ stroke-dasharray: 5 3 }} svg .roof {{ stroke-width: 2.4 }}
svg .interval {{ stroke: var(--own); stroke-width: 1.4 }} svg .dot {{ fill: var(--own) }}
svg .leader {{ stroke: var(--faint); stroke-width: .6 }} svg .name {{ fill: var(--own); font-weight: 600 }}
svg .own {{ fill: var(--own, var(--ink)) }}
svg .ring {{ fill: none; stroke: var(--ink); stroke-width: 1.8 }}
.scroll {{ overflow-x: auto }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums }}
th {{ font-weight: 600; text-align: right; padding: 3px 8px; color: var(--faint); font-size: 13px }}
td {{ text-align: right; padding: 3px 8px }} th:first-child, td:first-child {{ text-align: left; padding-left: 0 }}
.sums td {{ border-top: 1px solid var(--grid); vertical-align: top }} .sums small {{ display: block }}
.heat {{ border-collapse: separate; border-spacing: 2px; font-size: 12.5px }}
.heat td {{ text-align: center; min-width: 44px; padding: 5px 4px; background: rgb(var(--heat) / var(--s, 0)) }}
.heat th {{ padding: 2px 6px; text-align: center; white-space: nowrap }}
.heat th:first-child {{ text-align: left; position: sticky; left: 0; background: var(--paper) }}
.heat .deep {{ color: #ffffff }} .heat .best {{ outline: 2px solid var(--ink); font-weight: 700 }}
.heat .bad {{ background: none; font-weight: 700 }} .heat .ok {{ background: rgb(46 160 67 / .2) }}
.bars {{ list-style: none; margin: 0; padding: 0 }}
.bars li {{ display: grid; grid-template-columns: minmax(0, 5fr) minmax(0, 4fr) 206px; gap: 0 12px; padding: 3px 0;
  align-items: center }}
.bars li > :last-child {{ white-space: nowrap }}
.pair .bars li {{ grid-template-columns: minmax(0, 1fr) 130px }} .pair .bars li > :first-child {{ grid-column: 1 / -1 }}
.bars b {{ font-variant-numeric: tabular-nums }} .track {{ position: relative; height: 14px; background: none }}
.fill {{ position: absolute; inset: 0 auto 0 0; background: var(--bar); border-radius: 2px; min-width: 2px }}
.best .fill {{ background: var(--c0) }} .mark {{ position: absolute; top: -5px; bottom: -5px;
  border-left: 2px solid var(--c1) }}
details {{ margin-top: 10px }} summary {{ cursor: pointer; font-weight: 600; font-size: 14px }}
ul.rows {{ margin: 4px 0; padding-left: 20px; overflow-wrap: anywhere }}
@media (max-width: 600px) {{ .bars li {{ grid-template-columns: minmax(0, 1fr) 176px; gap: 0 8px }}
  .bars li > :first-child {{ grid-column: 1 / -1 }}
  .bars li > :last-child {{ font-size: 13px }}
  .heat {{ font-size: 12px; border-spacing: 1px }} .heat td {{ min-width: 0; padding: 5px 2px }}
  .heat th {{ padding: 2px }}
  .sums, .sums tbody {{ display: block }} .sums tr {{ display: grid; padding: 3px 0; border-top: 1px solid var(--grid);
  grid-template-columns: 26px 42px 70px 56px 62px minmax(76px, 1fr) }} .sums tr > :first-child {{ grid-column: 1 / -1 }}
  .sums td, .sums th {{ padding: 1px 0; font-size: 13px; border: 0 }} body {{ padding: 12px 16px }} }}
@media print {{ body {{ max-width: none }} section {{ break-inside: avoid }} }}
"""
