"""Five questions that a failed run raises, answered with pandas: `python docs/five-questions.py DIR [EARLIER ...]`.

DIR is the folder of a run (or its rows.csv), EARLIER are folders of runs before it; one may hold several runs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd

import reports
from reports.columns import JUDGED


def judged(df: pd.DataFrame) -> pd.DataFrame:
    """The rows of comparisons that took place, with `bad`: failed or not."""
    return df[df["verdict"].isin(JUDGED)].assign(bad=lambda rows: rows["verdict"] == "fail")


def which_stage(df: pd.DataFrame) -> pd.DataFrame:
    """Failed rows, bad elements and worst margin of each stage and oracle; the first stage that fails has the fault.

    Each stage is judged on what the one before it emitted, so stages behind a fault pass; `o_proj` is the whole chain.
    """
    groups = judged(df).groupby(["stage", "oracle"], observed=True)
    return groups.agg(
        failed=("bad", "sum"), rows=("bad", "size"), bad_elements=("mismatched", "sum"), margin=("margin_max", "max")
    )


def which_arch(df: pd.DataFrame) -> pd.DataFrame:
    """Share of failed rows, architectures across and stages down: one column means that arch, a full row that stage."""
    return judged(df).pivot_table("bad", "stage", "arch", aggfunc="mean", observed=True)


def since_when(df: pd.DataFrame) -> pd.DataFrame:
    """For each arch and stage that fails in its newest run: the last run that passed, the first that failed since."""
    runs = judged(df).groupby(["arch", "engine", "implementation", "stage", "run_id"], observed=True)
    table = runs.agg(bad=("bad", "any"), time=("time_utc", "min"), git=("git_revision", "first")).reset_index()
    rows = []
    for place, history in table.sort_values("time").groupby(
        ["arch", "engine", "implementation", "stage"], observed=True
    ):
        if not history["bad"].iloc[-1]:
            continue
        passed = history[~history["bad"]]
        after = history if passed.empty else history[history["time"] > passed["time"].iloc[-1]]
        last = "" if passed.empty else f"{passed['git'].iloc[-1]} ({passed['time'].iloc[-1]})"
        rows.append((*place, last, f"{after['git'].iloc[0]} ({after['time'].iloc[0]})"))
    columns = ["arch", "engine", "implementation", "stage", "last that passed", "first that fails"]
    return pd.DataFrame(rows, columns=columns)


def which_inputs(
    df: pd.DataFrame, columns: tuple[str, ...] = ("family", "tokens", "tp_size", "preset")
) -> pd.DataFrame:
    """Share of failed rows for each value of each column, and how many times the overall share that is; worst first."""
    rows = judged(df)
    overall = rows["bad"].mean()
    parts = []
    for column in columns:
        shares = rows.groupby(column, observed=True)["bad"].agg(["mean", "sum", "size"])
        parts.append(shares.set_axis([f"{column} = {value}" for value in shares.index]))
    table = pd.concat(parts).set_axis(["share failed", "failed", "rows"], axis=1)
    table["times overall"] = table["share failed"] / overall if overall else 0.0
    return table.sort_values(["times overall", "failed"], ascending=False)


def how_bad(df: pd.DataFrame) -> pd.DataFrame:
    """RMS error of the block's products: of the arithmetic alone, with FP8's quantisation, and their ratio.

    A ratio near 0 means that the model cannot see the tensor core's error beside the format's own noise; near 1 the
    arithmetic is what the model sees, and `with format` is then far above the 2 to 4 % of FP8 itself. The bias is the
    part of the error that does not cancel: it draws every layer's output alike, so it counts where it is no longer
    small beside the RMS error.
    """
    rows = judged(df)
    rows = rows[rows["oracle"].isin(["bound", "format"]) & rows["stage"].isin(["wo_a", "wo_b", "o_proj"])]
    energy, drawn = rows["compared"] * rows["rms_rel_error"] ** 2, rows["compared"] * rows["signed_bias"]
    keys = ["arch", "implementation", "stage", "oracle"]
    sums = rows.assign(energy=energy, drawn=drawn).groupby(keys, observed=True)[["energy", "drawn", "compared"]].sum()
    rms = ((sums["energy"] / sums["compared"]) ** 0.5).unstack("oracle")
    bias = (sums["drawn"] / sums["compared"]).unstack("oracle")
    table = rms.reindex(columns=["bound", "format"]).set_axis(["arithmetic", "with format"], axis=1)
    table["arithmetic / format"] = table["arithmetic"] / table["with format"]
    return table.assign(bias=bias.get("bound", bias.get("format")))


QUESTIONS = {
    "Which stage?": which_stage,
    "Which architecture?": which_arch,
    "Since when?": since_when,
    "Which inputs?": which_inputs,
    "How bad for the model?": how_bad,
}


def main(paths: list[str]) -> None:
    """Print the answers; the first path is the run in question, the others are earlier ones."""
    if not paths:
        sys.exit(f"usage: python {Path(__file__).name} DIR [EARLIER ...]")
    frames = [reports.load(path) for path in paths]
    everything = pd.concat(frames, ignore_index=True)
    for question, answer in QUESTIONS.items():
        table = answer(everything if answer is since_when else frames[0])
        print(f"\n{question}\n")
        print("nothing fails" if table.empty else table.to_string(float_format=lambda value: f"{value:.4g}"))


if __name__ == "__main__":
    main(sys.argv[1:])
