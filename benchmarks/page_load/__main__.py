"""Seconds until the page of a large live run is drawn, its frames, and the processor time of following it.

    python -m benchmarks.page_load [--workers 1000] [--steps 10000] [--seconds 15] [--loads 3] [--follows 3]

Needs `pip install 'headway[browser]'` and Chromium (CHROMIUM=path, or `chromium` on the PATH). The last line is one
JSON object.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from playwright.sync_api import Browser, CDPSession, Page, sync_playwright

from .run import RUN, served, training, write_files

FRAMES = """
(() => {
  window.watch?.disconnect();
  const gaps = window.gaps = [], long = window.long = [];
  window.watch = new PerformanceObserver((list) => { for (const one of list.getEntries()) long.push(one.duration); });
  watch.observe({ type: "longtask", buffered: false });
  let last = performance.now();
  const note = (now) => { gaps.push(now - last); last = now; if (gaps === window.gaps) requestAnimationFrame(note); };
  requestAnimationFrame(note);
})();
"""
LONGEST_LOAD_S = 60.0
DRAWN = """
document.querySelectorAll("#page .plot").length >= 7
  && [...document.querySelectorAll("#page .plot")].every((one) => one.firstChild !== null)
  && document.querySelectorAll("#page .samples details").length >= 16
  && document.querySelectorAll("#page .grid.live table").length >= 3
"""
WORK = {"TaskDuration": "all", "ScriptDuration": "script", "LayoutDuration": "layout", "RecalcStyleDuration": "style"}
"""The names of Chromium's figures, and those of the output."""
ASKED = ("", "page.json", "live.json", "live.json?first=0")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--loads", type=int, default=3)
    parser.add_argument("--follows", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        directory = write_files(Path(root) / RUN, options.steps)
        with (
            served(Path(root) / "server", options.workers, options.steps) as (server, url),
            training(directory, options.steps),
            dashboard(directory, url) as (process, address),
        ):
            found = measured(address, process, psutil.Process(server.pid), options)
    print(json.dumps({"workers": options.workers, "steps": options.steps, **found}))


@contextmanager
def dashboard(directory: Path, url: str) -> Iterator[tuple[psutil.Process, str]]:
    """Yield the process of `headway dashboard` and its address, once it has read the run."""
    command = [sys.executable, "-m", "headway", "dashboard", str(directory), "--broker", url, "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        yield psutil.Process(started.pid), json.loads(started.stdout.readline())["url"]
        started.terminate()


def measured(address: str, process: psutil.Process, server: psutil.Process, options: Any) -> dict[str, Any]:
    """Load the page some times, then follow it."""
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    began = time.monotonic()
    while not is_ready(address):
        time.sleep(0.05)
    ready_s = time.monotonic() - began
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        loads = []
        for _ in range(options.loads):
            page = browser.new_page()
            loads.append(loaded(page, address))
            page.close()
        page = browser.new_page()
        loaded(page, address)
        before = [cpu_s(process), cpu_s(server)]
        follows = [followed(page, options.seconds) for _ in range(options.follows)]
        seconds = options.follows * options.seconds
        used = [cpu_s(process) - before[0], cpu_s(server) - before[1]]
        tasks = longest_tasks_ms(browser, page, options.seconds)
        sizes = {name: len(page.request.get(address + name).body()) for name in ASKED}
        browser.close()
    return {
        "ready_s": round(ready_s, 2),
        "load_s": [round(load, 2) for load in loads],
        "follows": follows,
        "longest_frame_ms_median": statistics.median(one["frame_ms_max"] for one in follows),
        "longest_tasks_cpu_ms": tasks,
        "dashboard_cpu_share": round(used[0] / seconds, 3),
        "server_cpu_share": round(used[1] / seconds, 3),
        "bytes": sizes,
    }


def followed(page: Page, seconds: float) -> dict[str, Any]:
    """Scroll through the page as it renews itself, and return its frames and its main thread's work in a second."""
    page.evaluate("scrollTo(0, 0)")
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    before = thread_s(session)
    page.evaluate(FRAMES)
    first = page.evaluate("content.number")
    page.mouse.move(5, 500)  # beside the charts: one under the pointer would stay as it is
    for _ in range(int(seconds)):
        page.mouse.wheel(0, 400)
        time.sleep(1.0)
    gaps = sorted(page.evaluate("gaps"))
    return {
        "renewals": page.evaluate("content.number") - first,
        "frames": len(gaps),
        "frame_ms_p50": round(gaps[len(gaps) // 2], 1),
        "frame_ms_p99": round(gaps[int(len(gaps) * 0.99)], 1),
        "frame_ms_max": round(gaps[-1], 1),
        "long_tasks_ms": [round(task) for task in page.evaluate("long")],
        "page_cpu_share": {
            name: round((after - before[name]) / seconds, 4) for name, after in thread_s(session).items()
        },
    }


def longest_tasks_ms(browser: Browser, page: Page, seconds: float) -> list[float]:
    """Return the processor time in ms of the page's five longest tasks, which other work does not lengthen."""
    browser.start_tracing(page=page, categories=["toplevel"])
    followed(page, seconds)
    events = json.loads(browser.stop_tracing())["traceEvents"]
    mains = {
        (event["pid"], event["tid"])
        for event in events
        if event["name"] == "thread_name" and event["args"]["name"] == "CrRendererMain"
    }
    tasks = [event.get("tdur", 0) / 1000 for event in events if (event["pid"], event["tid"]) in mains]
    return [round(task, 1) for task in sorted(tasks, reverse=True)[:5]]


def is_ready(address: str) -> bool:
    """Whether the dashboard has read the files and looked at the broker."""
    with urllib.request.urlopen(address + "live.json?first=0") as answer:
        live = json.load(answer)
    return bool(live["page"] and live["status"])


def loaded(page: Page, address: str) -> float:
    """Return the seconds from the request until charts and live tables are drawn."""
    began = time.monotonic()
    page.goto(address)
    while not page.evaluate(DRAWN):
        if time.monotonic() - began > LONGEST_LOAD_S:
            raise TimeoutError(f"not drawn: {page.inner_text('body')[:500]}")
        time.sleep(0.02)
    page.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
    return time.monotonic() - began


def thread_s(session: CDPSession) -> dict[str, float]:
    """Return the processor seconds of the page's main thread so far."""
    names = {
        "TaskDuration": "all",
        "ScriptDuration": "script",
        "LayoutDuration": "layout",
        "RecalcStyleDuration": "style",
    }
    metrics = session.send("Performance.getMetrics")["metrics"]
    return {names[one["name"]]: one["value"] for one in metrics if one["name"] in names}


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    main()
