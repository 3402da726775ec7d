"""One HTML page that shows a run, or several side by side, without any other host.

    Record ──content.py──► Page ──document──► one HTML file: JSON, page.css, charts.js, page.js
                            │
                            └──► live_page.py   headway dashboard: the page again, and each second
    broker ──────────────────────────┘          what the broker says

`content.py` turns figures of `deploy/run/` into JSON, thinned to what a screen shows, and puts the JSON, the style and
the scripts into one file. `charts.js` draws curves, bars and heat maps as SVG, `page.js` lays them out.
A live page merges what it hears into what it shows, a few milliseconds in each frame, so that a reader keeps the place.
`live_page.py` follows a run that is going on, and serves its page.

The invariant: the page shows exactly what `--json` prints, and obeys no text in it. Texts become text nodes, never
markup, and the page's content security policy names the only scripts that may run.
"""
