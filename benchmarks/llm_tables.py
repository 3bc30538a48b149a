"""Markdown tables from results of language models. One function a table, as in `tables.py`."""

from __future__ import annotations

from collections.abc import Callable

from goals import percent
from harness.results import Document, duration, figure, ratio, size
from tables import small, table

OBJECTIVES = ("sync", "decoupled", "naive", "recompute")


def objectives(document: Document) -> str:
    settings, facts = document["settings"], document["machine"]
    names = [name for name in OBJECTIVES if any(name in cell for cell in document["cells"])]

    def said(cell: Document, name: str) -> str:
        if name not in cell:
            return ""
        one, share = cell[name], cell[name].get("share_of_gain")
        spread = f"{one['mean']:.3f} ({one['least']:.2f} to {one['most']:.2f})"
        return spread if share is None else f"{spread}, {percent(share)}"

    rows = []
    for cell in document["cells"]:
        kind = f"{cell['eps']:g}, {cell['clip']:g}, {cell['learning_rate']:g}"
        rows.append([f"**{kind}**" if cell["is_bold"] else kind, *(said(cell, name) for name in names)])
    start = sum(cell["start"] for cell in document["cells"]) / len(document["cells"])
    line = (
        f"{facts['device']}, torch {facts['torch']}. Share of exact answers of the current policy at the end: mean of "
        f"{settings['seeds']} seeds, the least and the most in brackets, then the share of sync's gain. Sorting "
        f"{settings['digits']} digits; {settings['steps']} steps of {settings['prompts'] * settings['group']} answers "
        f"in {settings['minibatches']} minibatches, {start:.2f} at the start; lag {settings['lag']} except for sync."
    )
    return "\n\n".join([table(["Adam's eps, clip, learning rate", *names], rows), small(line)])


def llm_line(document: Document, how: str) -> str:
    facts = document["machine"]
    where = facts.get("gpu", f"CPU, {facts['threads']} threads")
    versions = ", ".join(f"{name} {facts[name]}" for name in ("torch", "triton", "transformers") if name in facts)
    look = " A quick run: a look, not a result." if document["settings"]["quick"] else ""
    return small(f"{where}, {versions}, Python {facts['python']}, {facts['date']}. {how}{look}")


def llm_generation(document: Document) -> str:
    """Tokens a second; the ratio is to ours."""
    parts = []
    for case in document["contests"]:
        ours, rows = case["cases"]["sharpwave"]["min_ns"], []
        for label, took in case["cases"].items():
            called = "**Sharpwave**" if label == "sharpwave" else label
            rates = (case["tokens"] / took[key] * 1e9 for key in ("min_ns", "median_ns"))
            best, median = (f"{rate:,.0f}" for rate in rates)
            rows.append([called, f"{best} ({median})", "" if label == "sharpwave" else ratio(took["min_ns"] / ours)])
        head = f"{case['model']}, {case['batch']} side by side, {case['requests']:,} answers"
        about = f"{head} of {figure(case['mean_length'])} tokens on average, {case['longest']:,} at most"
        parts.append(table([about, "tokens a second", "Sharpwave's over it"], rows))
    how = f"Best of {document['settings']['rounds']} interleaved runs, the median in brackets."
    return "\n\n".join([*parts, llm_line(document, how)])


def llm_decode(document: Document) -> str:
    rows = []
    for case in document["steps"]:
        taken = case["cases"].values()
        cells = [f"{duration(one['min_ns'])} ({ratio(one['min_ns'] / case['bytes_ns'])})" for one in taken]
        what = f"{case['model']}, {case['slots']:,} slots of {case['length']:,} tokens"
        rows.append([what, size(case["bytes"]), duration(case["bytes_ns"]), *cells])
    head = ["a decode step", "bytes", "their time", *document["steps"][0]["cases"]]
    swaps = []
    for case in document["swaps"]:
        cells = [
            f"{duration(one['min_ns'])} ({figure(case['bytes'] / one['min_ns'])} GB/s)"
            for one in case["cases"].values()
        ]
        swaps.append([f"{case['model']}, {size(case['bytes'])}", *cells])
    how = f"A copy moves {figure(document['copy_bytes_per_s'] / 1e9)} GB/s, reads and writes together. "
    how += f"Minimum of {document['settings']['rounds']} interleaved runs."
    parts = [table(head, rows), table(["new weights", *document["swaps"][0]["cases"]], swaps)]
    apart = [
        [
            f"{case['model']}, {case['dtype']}",
            f"{case['tokens']:,}",
            f"{case['largest']:.2g}",
            f"{case['mean']:.2g}",
            percent(case["above_0.02"]),
        ]
        for case in document.get("scores", [])
    ]
    if apart:
        parts.append(
            table(["log-probabilities", "tokens", "largest difference", "mean difference", "above 0.02"], apart)
        )
    return "\n\n".join([*parts, llm_line(document, how)])


def gpu_learner(document: Document) -> str:
    rows = []
    for case in document["cases"]:
        share = case["operations_per_s"] / document["bf16_operations_per_s"]
        rows.append(
            [f"{case['model']}, {case['parameters']:,} parameters", f"{case['tokens_per_s']:,.0f}",
             f"{figure(case['operations_per_s'] / 1e12)} ({percent(share)})", percent(case["fill"]),
             duration(case["step_s"] * 1e9), size(case["memory_bytes"])]
        )  # fmt: skip
    settings, facts = document["settings"], document["machine"]
    head = ["learner", "tokens a second", "10^12 operations a second", "places filled", "a step", "memory at most"]
    line = (
        f"{facts['gpu']}, torch {facts['torch']}. A product of two 8,192 x 8,192 matrices in bfloat16 in the same run: "
        f"{figure(document['bf16_operations_per_s'] / 1e12)} * 10^12 operations a second. Rows of "
        f"{settings['row_tokens']:,} tokens, {settings['rows']} to a pass, about {settings['tokens']:,} tokens a step, "
        f"sequences of up to {settings['longest']:,}; {settings['steps']} steps."
    )
    return "\n\n".join([table(head, rows), small(line)])


def llm_async(document: Document) -> str:
    """Wall time to the goal of each contender and seed; what a step costs."""
    settings, runs = document["settings"], document["runs"]
    goal, rows, reached = settings["goal"], [], {}
    for run in runs:
        at, who = run["reached_s"], contender(run)
        reached.setdefault(who, []).append(at)
        costs = run["decode"]
        rows.append(
            [f"{who}, seed {run['seed']}", "not reached" if at is None else f"{at:.1f} s", f"{run['steps']:,}",
             duration(run["step_s"] * 1e9), duration(run["train_s"] * 1e9), f"{run['made_tokens_per_s']:,.0f}",
             f"{run['staleness']:.2f} ({run['staleness_max']})", duration(costs["mean_step_s"] * 1e9),
             figure(costs["mean_slots"]), percent(run["idle"]["learner"]), percent(run["idle"]["generator-0"])]
        )  # fmt: skip
    head = ["", f"held-out reward {goal:g}", "steps", "a step", "training", "tokens made a second",
            "staleness (most)", "a step of the engine", "slots in use", "learner idle", "engine idle"]  # fmt: skip
    parts = [table(head, rows)]
    means = {who: sum(at) / len(at) for who, at in reached.items() if None not in at}
    (sync, *_), (other, *_) = ([who for who in reached if who.startswith(kind)] or [""] for kind in ("sync", "async"))
    if sync in means and other in means:
        times = f"{means[sync]:.1f} s against {means[other]:.1f} s"
        parts.append(f"Mean wall time to the goal: {times}, **{ratio(means[sync] / means[other])}**.")
    parts.append(_cost_model(runs))
    if document["sweep"]:
        tried = [
            [contender(run), duration(run["step_s"] * 1e9), f"{run['made_tokens_per_s']:,.0f}",
             f"{run['staleness']:.2f} ({run['staleness_max']})"]
            for run in document["sweep"]
        ]  # fmt: skip
        parts.append(table(["short runs to choose from", "a step", "tokens made a second", "staleness (most)"], tried))
    first = runs[0]
    facts = document["machine"]
    line = (
        f"{facts['gpu']}, torch {facts['torch']}, {facts['at']}. Running sums over lists of log-normal lengths (median "
        f"{settings['median']:g}, sigma 1, at most {settings['longest']}); {settings['items']} lists a step, "
        f"{settings['group']} answers to each, of {figure(first['mean_length'])} tokens on average, drawn at "
        f"temperature {settings['temperature']:g}. Learning rate {settings['rate']:g}, {settings['held_out']} lists "
        f"held out. A step and its parts are means and medians of the last nine tenths of a run; a and b are least "
        f"squares over the engine's timeline."
    )
    return "\n\n".join([*parts, small(line)])


def _cost_model(runs: list[Document]) -> str:
    """a and b of synchronous runs alone: in the others all slots are in use nearly always, which fits any a."""

    def mean(key: Callable[[Document], float], is_sync: bool) -> str:
        values = [key(run) for run in runs if (run["max_staleness"] == 0) is is_sync]
        return duration(sum(values) / len(values) * 1e9) if values else "unknown"

    a, b = (mean(lambda run, key=key: run["decode"][key], True) for key in ("a_s", "b_s"))
    sync, other = (mean(lambda run: run["train_s"] + run["publish_s"], is_sync) for is_sync in (True, False))
    return (
        f"Cost model: in the synchronous runs a step of the engine takes a + b * slots in use, a = {a}, b = {b}. "
        f"Training a batch and publishing takes T = {sync} there, and {other} beside an engine that is never idle."
    )


def llm_methods(document: Document) -> str:
    """Held-out reward at the end of runs, by method, and its share of the synchronous runs' gain."""
    settings, by_method = document["settings"], {}
    for run in document["runs"]:
        by_method.setdefault(run["method"], []).append(run)
    gains = {method: sum(run["end"] - run["start"] for run in runs) for method, runs in by_method.items()}
    rows = []
    for method, runs in by_method.items():
        ends = [run["end"] for run in runs]
        share = "" if method == "sync" else percent(gains[method] / gains["sync"])
        staleness, clipped = (sum(run[key] for run in runs) / len(runs) for key in ("staleness", "clip_share"))
        spread = f"{sum(ends) / len(ends):.3f} ({min(ends):.2f} to {max(ends):.2f})"
        rows.append([method, spread, share, f"{staleness:.2f}", percent(clipped)])
    start = sum(run["start"] for run in document["runs"]) / len(document["runs"])
    line = (
        f"CPU, torch {document['machine']['torch']}. Whole runs of {settings['steps']} steps of 256 answers, sorting 4 "
        f"digits, clip {settings['clip']:g}, learning rate {settings['rate']:g}, 4 minibatches; others than sync with "
        f"max_staleness={settings['max_staleness']}. Mean of {len(settings['seeds'])} seeds, the least and the most in "
        f"brackets; {start:.2f} at the start."
    )
    head = ["method", "held-out reward", "share of sync's gain", "mean staleness", "tokens clipped"]
    return "\n\n".join([table(head, rows), small(line)])


def contender(run: Document) -> str:
    lag = run["max_staleness"]
    who = f"sync, {run['slots']} slots" if lag == 0 else f"async, {run['slots']} slots, max_staleness={lag}"
    return f"{who}, MPS" if run["mps"] else who
