"""The page of ``lightnet report``: one HTML file that needs nothing from outside."""

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #5d6672; --line: #d9dee5; --back: #fff; --box: #f5f7f9; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ed; --soft: #98a2ae; --line: #333a43; --back: #14171b; --box: #1c2026; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink);
       font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 1160px; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.6rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2.4rem 0 .7rem; }
h3 { font-size: .92rem; font-weight: 600; margin: 0 0 .3rem; }
h1, h2, h3, p { overflow-wrap: anywhere; } p { margin: .4rem 0; } .soft { color: var(--soft); } .small { font-size: .85rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(155px, 1fr)); gap: .7rem; margin-top: 1.3rem; }
.tile { background: var(--box); border: 1px solid var(--line); border-radius: 8px; padding: .6rem .8rem; }
.tile b { display: block; font-size: 1.2rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: .8rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(480px, 100%), 1fr)); gap: 1.2rem; }
figure { margin: 0; border: 1px solid var(--line); border-radius: 8px; padding: .8rem .8rem .3rem; }
figure svg { width: 100%; height: auto; display: block; } figure svg text { font-family: inherit; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .28rem 1.1rem .28rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 500; } td.number, th.number { text-align: right; }
td.name { white-space: nowrap; }
.scroll { overflow-x: auto; }
.bar { display: inline-block; height: .65em; border-radius: 2px; vertical-align: baseline; }
.swatch { display: inline-block; width: .75em; height: .75em; border-radius: 2px; margin-right: .45em; }
pre { background: var(--box); border: 1px solid var(--line); border-radius: 8px; padding: .8rem 1rem; overflow-x: auto;
      font: .82rem/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; margin: .5rem 0; }
pre.sample { white-space: pre-wrap; overflow-wrap: anywhere; max-height: 32rem; overflow-y: auto; }
@media (max-width: 600px) {
  main { padding: 1.2rem .8rem 3rem; } figure { padding: .6rem .3rem .2rem; } h3 { padding-left: .4rem; }
  .tiles { grid-template-columns: 1fr 1fr; } .tile b { font-size: 1.05rem; }
}
details { margin: .5rem 0; } summary { cursor: pointer; color: var(--soft); }
"""

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>{{ style }}</style>
</head>
<body>
<main>
<h1>{{ title }}</h1>
{% for run in runs %}
<p class="soft">{% if several %}<span class="swatch" style="background:{{ run.color }}"></span><b>{{ run.name }}</b>: \
{% endif %}{{ run.summary }}</p>
{% endfor %}

{% if not several %}
<div class="tiles">
{% for label, value in runs[0].tiles %}<div class="tile"><b>{{ value }}</b><span>{{ label }}</span></div>
{% endfor %}
</div>
{% else %}
<h2>Runs</h2>
<div class="scroll"><table>
<tr><th>run</th>{% for label in tile_labels %}<th class="number">{{ label }}</th>{% endfor %}</tr>
{% for run in runs %}
<tr><td class="name"><span class="swatch" style="background:{{ run.color }}"></span>{{ run.name }}</td>
{% for label in tile_labels %}<td class="number">{{ run.by_label.get(label, "") }}</td>{% endfor %}</tr>
{% endfor %}
</table></div>
{% endif %}

{% for section, figures in sections %}
<h2>{{ section }}</h2>
<div class="charts">
{% for heading, svg in figures %}<figure><h3>{{ heading }}</h3>{{ svg }}</figure>
{% endfor %}
</div>
{% endfor %}
<p class="soft small">{{ legend }}</p>

{% for run in runs if run.heldout %}
<h2>Held-out text{{ run.suffix }}</h2>
<div class="scroll"><table>
<tr><th></th><th class="number">bits per byte</th><th></th></tr>
{% for name, value, width, color in run.heldout.rows %}
<tr><td>{{ name }}</td><td class="number">{{ value }}</td>
<td style="min-width:16rem"><span class="bar" style="width:{{ width }}%;background:{{ color }}"></span></td></tr>
{% endfor %}
</table></div>
<p class="soft small">{{ run.heldout.note }}</p>
{% endfor %}

{% for run in runs if run.sample is not none %}
<h2>Sample{{ run.suffix }}</h2>
<pre class="sample">{{ run.sample }}</pre>
{% endfor %}

{% for run in runs if run.pictures %}
<h2>Pictures{{ run.suffix }}</h2>
<div class="charts">
{% for name, data in run.pictures %}<figure><h3>{{ name }}</h3>
<img alt="{{ name }}" src="data:image/png;base64,{{ data }}" style="max-width:100%"></figure>
{% endfor %}
</div>
{% endfor %}

{% if differences %}
<h2>What differs between the runs</h2>
<div class="scroll"><table>
<tr><th>field</th>{% for run in runs %}<th>{{ run.name }}</th>{% endfor %}</tr>
{% for field, values in differences %}
<tr><td>{{ field }}</td>{% for value in values %}<td>{{ value }}</td>{% endfor %}</tr>
{% endfor %}
</table></div>
{% endif %}

{% for run in runs if run.events %}
<h2>Events{{ run.suffix }}</h2>
<div class="scroll"><table>
<tr><th class="number">step</th><th>event</th><th>time</th><th>facts</th></tr>
{% for event in run.events %}
<tr><td class="number">{{ event.step }}</td><td>{{ event.name }}</td><td>{{ event.time }}</td>
<td>{{ event.facts }}</td></tr>
{% endfor %}
</table></div>
{% if run.more_events %}<p class="soft small">and {{ run.more_events }} earlier ones</p>{% endif %}
{% endfor %}

{% for run in runs if run.environment %}
<h2>Environment{{ run.suffix }}</h2>
<div class="scroll"><table>
{% for name, value in run.environment %}<tr><th>{{ name }}</th><td>{{ value }}</td></tr>
{% endfor %}
</table></div>
{% endfor %}

{% for run in runs if run.config %}
<h2>Configuration{{ run.suffix }}</h2>
<details{% if not several %} open{% endif %}><summary>config.yaml, as resolved</summary>
<pre>{{ run.config }}</pre></details>
{% endfor %}

<p class="soft small">Written {{ written }} by lightnet report from {{ sources }}.</p>
</main>
</body>
</html>
"""
