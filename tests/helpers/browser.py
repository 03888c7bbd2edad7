"""Pages as headless Chromium shows them."""

import html
import json
import re
import shutil
import subprocess

import pytest

needs_chromium = pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr")
# No window is narrower than 500 pixels, a frame is.
FRAME = """<!doctype html><meta name="color-scheme" content="light dark"><body>
<iframe src="probed.html" style="border: 0; height: 900px; width: {width}px"></iframe>
<script>onmessage = event => {{ document.body.dataset.seen = event.data }}</script></body>"""
PROBE = """<script>
const inks = ({{ctx}}) => {{  // colors of a chart's pixels
  const all = ctx.getImageData(0, 0, ctx.canvas.width, ctx.canvas.height).data, found = {{}};
  for (let at = 0; at < all.length; at += 4) if (all[at + 3] === 255) found[all.slice(at, at + 3).join()] = 1;
  return Object.keys(found);
}};
setTimeout(async () => {{
  const seen = (await (async () => {{ {script} }})()) ?? {{}};
  seen.width = innerWidth;
  seen.is_wide = document.documentElement.scrollWidth > innerWidth;
  parent.postMessage(JSON.stringify(seen), "*");
}}, 300)</script></body>"""


def data_of(page):
    """The data that a page's scripts read."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


def seen_by(path, width, script, is_dark=False):
    """Open a page in a frame, run the body of an async function in it, and return what that returned.

    No error may be on the console, and the page may not be wider than the frame.
    """
    path.with_name("probed.html").write_text(path.read_text().replace("</body>", PROBE.format(script=script)))
    frame = path.with_name("frame.html")
    frame.write_text(FRAME.format(width=width))
    scheme = f"--blink-settings=preferredColorScheme={int(not is_dark)}"
    options = (*OPTIONS, "--window-size=1300,1000", scheme, "--virtual-time-budget=2000")
    words = ["chromium", *options, "--dump-dom", frame.as_uri()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert "CONSOLE" not in done.stderr, done.stderr
    found = json.loads(html.unescape(re.search('data-seen="(.*?)"', done.stdout)[1]))
    assert found["width"] == width and not found["is_wide"], found
    return found
