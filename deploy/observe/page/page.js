// Lays out what the element `content` holds: one run, or several side by side.

const TILES = [
  ["steps", "steps trained"],
  ["reward_last", "reward, last steps"],
  ["eval_before", "pass rate before"],
  ["eval_after", "pass rate after"],
  ["max_lag_seen", "largest lag"],
  ["max_lag_allowed", "lag allowed"],
  ["trained_trajectories", "trajectories trained"],
  ["trained_twice", "trained twice"],
  ["agreement_mean", "logprobs, engine against learner"],
  ["learner_wait_fraction", "learner waiting", (value) => `${Math.round(100 * value)}%`],
  ["trained_tokens_per_s", "tokens/s trained"],
  ["generation_tokens_per_s", "tokens/s generated"],
  ["wall_s", "seconds"],
  ["worker_restarts", "workers restarted"],
  ["server_restarts", "servers restarted"],
];
const PHASES = [["take_s", "waiting", 6], ["train_s", "training", 0], ["publish_s", "publishing", 1], ["checkpoint_s", "checkpoint", 2]];

function drawn(run, name, colour, text, options = {}) {
  const { mean, low, high } = run.curves[name];
  return { name: text, colour, xs: run.steps, ys: mean, low, high, ...options };
}

function each(runs, name, text) {
  return runs.map((run, index) => drawn(run, name, index, runs.length > 1 ? run.name : text));
}

function marksOf(runs) {
  return runs.length > 1 ? [] : runs[0].events.filter((event) => event.kind !== "start").map((event) => ({ x: event.step, text: event.text }));
}

// A value of each step, faint, with its mean over the last steps; of several runs the mean alone.
function averaged(runs, name, average) {
  if (runs.length > 1) return each(runs, average);
  return [drawn(runs[0], name, 0, "each step", { faint: true }), drawn(runs[0], average, 0, "mean of 5 steps", { low: [], high: [] })];
}

function passRates(runs) {
  return runs.map((run, index) => ({
    name: runs.length > 1 ? run.name : "pass rate", colour: index, dots: true, xs: run.evaluations.map((rate) => rate.step), ys: run.evaluations.map((rate) => rate.pass_rate),
  }));
}

// What a researcher looks for first.
function learning(runs) {
  const marks = marksOf(runs), note = "over steps", many = runs.length > 1;
  if (!runs.some((run) => run.steps.length)) return make("section");
  return make("section", {}, make("h2", {}, "Learning"), make("div", { class: "grid" },
    curves(many ? "Reward, mean of 5 steps" : "Reward", averaged(runs, "reward_mean", "reward_average"), { marks, from: 0, to: 1, note }),
    curves("Held-out pass rate", passRates(runs), { marks, from: 0, to: 1, over: runs.map((run) => run.steps), note }),
    many ? curves("Mean lag", each(runs, "lag_mean"), { from: 0, note }) : lagMap(runs[0]),
    curves("Loss", each(runs, "loss", "loss"), { marks, note }),
    runs.flatMap((run) => partsOf(run, named(run, runs)))));
}

// The parts of a reward, trained and held out; one alone is the reward itself.
function partsOf(run, prefix) {
  const trained = Object.entries(run.reward_parts).map(([name, { mean, low, high }], colour) => ({ name, colour, xs: run.steps, ys: mean, low, high }));
  const rates = run.evaluations, xs = rates.map((rate) => rate.step), names = [...new Set(rates.flatMap((rate) => Object.keys(rate.reward ?? {})))];
  const heldOut = names.sort().slice(0, COLOURS).map((name, colour) => ({ name, colour, dots: true, xs, ys: rates.map((rate) => rate.reward?.[name] ?? null) }));
  const note = "each function's own score, and its measures", over = [run.steps];
  return [
    trained.length > 1 ? curves(`${prefix}Parts of the reward`, trained, { note: `${note}, mean of 5 steps` }) : [],
    heldOut.length > 1 ? curves(`${prefix}Parts of the reward, held out`, heldOut, { note, over }) : [],
  ].flat();
}

function training(runs) {
  const marks = marksOf(runs), note = "over steps";
  if (!runs.some((run) => run.steps.length)) return make("section");
  return make("section", {}, make("h2", {}, "Training"), make("div", { class: "grid" },
    curves("Trained tokens per second", averaged(runs, "trained_tokens_per_s", "trained_tokens_per_s_average"), { marks, from: 0, note: "waiting included" }),
    curves("Tokens per response", each(runs, "response_tokens_mean", "mean"), { marks, from: 0, note }),
    curves("Gradient norm", each(runs, "grad_norm", "norm"), { marks, note }),
    runs.flatMap((run) => agentsOf(run, named(run, runs))),
    runs.length > 1 ? [] : [phasesOf(runs[0]), histogram(runs[0].lag)]),
    runs.length > 1 ? columns(runs, (run) => [lagMap(run), histogram(run.lag), phasesOf(run)]) : null);
}

// The episodes that agents played: nothing in a run without an agent.
function agentsOf(run, prefix) {
  if (!("agent/turns_mean" in run.curves)) return [];
  const lines = (names) => Object.entries(names).map(([name, text], colour) => drawn(run, `agent/${name}`, colour, text));
  const note = "over steps";
  return [
    curves(`${prefix}Agents: mean episode`, lines({ turns_mean: "turns", tool_calls_mean: "tool calls", tool_s_mean: "seconds of tools" }), { from: 0, note }),
    curves(`${prefix}Agents: shares`, lines({ fork_fraction: "turns that fork", reread_fraction: "tokens re-read by forks", unseen_fraction: "turns unseen" }), { from: 0, note }),
  ];
}

// A column for each run, however many there are and however long their names.
function columns(runs, of) {
  if (runs.length === 1) return make("div", { class: "grid" }, of(runs[0]));
  return make("div", { class: "columns", tabindex: "0", role: "region", "aria-label": "A column for each run" }, runs.map((run, index) =>
    make("div", { class: "column" }, make("h3", {}, make("span", { class: `swatch f${index % COLOURS}` }), run.name), of(run))));
}

// One chart for the loss of a stage without workers, and one for each figure of held-out records or prompts.
function stagesOf(run) {
  return run.stages.flatMap((stage) => {
    const line = (name, text, colour) => ({ name: text, colour, xs: stage.steps, ys: stage.curves[name].mean, low: stage.curves[name].low, high: stage.curves[name].high });
    const losses = ["loss", "held_out/loss"].filter((name) => name in stage.curves);
    const others = Object.keys(stage.curves).filter((name) => !losses.includes(name));
    const note = "over steps of the stage";
    return [
      curves(`${stage.name}: loss`, losses.map((name, index) => line(name, name === "loss" ? "trained" : "held out", index)), { note }),
      ...others.map((name) => curves(`${stage.name}: ${name}`, [line(name, name, 1)], name === "pass_rate" ? { note, from: 0, to: 1 } : { note })),
    ];
  });
}

function lagMap(run) {
  const lines = [drawn(run, "lag_mean", 2, "mean", { low: [], high: [] }), { ...drawn(run, "lag_max", 4, "largest"), ys: run.curves.lag_max.high.length ? run.curves.lag_max.high : run.curves.lag_max.mean, low: [], high: [] }];
  for (const line of lines) line.xs = line.xs.map((step) => step + 0.5);
  const note = "Shade: the share of a step's trajectories, by the lag of their oldest trained token. Dashes: the bound.";
  return heatMap("Lag", run.lag, lines, { bound: run.max_lag, note });
}

function histogram(map, title = "Trained sequences by lag") {
  const largest = Math.max(...map.totals, 1), rows = map.rows.map((row, index) => {
    const bar = make("div", { class: "bar" });
    bar.style.width = `${(100 * map.totals[index]) / largest}%`;
    return [rowName(row), map.totals[index], bar];
  });
  const shown = table([["lag", true], ["trajectories", true], ["share", false]], rows, title);
  for (const row of shown.querySelectorAll("tr")) row.lastChild.className = "bars";
  return make("div", { class: "card" }, make("h3", {}, title), shown);
}

function phasesOf(run) {
  const series = PHASES.map(([key, name, colour]) => ({ name, colour, ys: run.phases.seconds[key] }));
  return stackedBars("Seconds of a step", run.phases.first, run.phases.last, series);
}

function named(run, runs) {
  return runs.length > 1 ? `${run.name}: ` : "";
}

function tiles(summary) {
  const shown = TILES.filter(([key]) => summary[key] !== undefined && summary[key] !== null);
  return make("dl", { class: "tiles" }, shown.map(([key, name, format = figure]) => make("div", {}, make("dt", {}, name), make("dd", {}, typeof summary[key] === "number" ? format(summary[key]) : figure(summary[key])))));
}

// A broker that answers says the name and the state above; a column has the name.
function heading(run, isAlone) {
  const badge = make("span", { class: `badge ${run.state === "running" ? "running" : ""}` }, run.state);
  return make("header", {}, isAsked ? null : isAlone ? make("h1", {}, run.name, " ", badge) : badge,
    make("p", { class: "quiet" }, run.directory),
    notes(run.notes));
}

function notes(sentences) {
  return sentences.length ? make("ul", { class: "notes", role: "status" }, sentences.map((sentence) => make("li", {}, sentence))) : null;
}

// A table with a column for each run, in which long names and values are broken.
function byRun(shown) {
  shown.classList.add("by-run");
  return shown;
}

function summaries(runs) {
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.summary)))];
  return byRun(table([["figure", false], ...runs.map((run) => [run.name, true])], keys.map((key) => [key, ...runs.map((run) => run.summary[key])]), "Summary figures"));
}

function events(run) {
  const rows = run.events.slice().reverse().map((event) => [event.step, event.kind, make("span", {}, event.text)]);
  const earlier = run.earlier_events ? make("p", { class: "quiet" }, `${figure(run.earlier_events)} earlier events are left out.`) : null;
  const rates = run.evaluations.map((rate) => [rate.step, rate.incarnation, rate.pass_rate, rate.pass_at_k ?? "-", rate.samples ?? "-"]);
  return [
    make("div", { class: "card" }, make("h3", {}, "Events"), table([["step", true], ["event", false], ["what happened", false]], rows, "Events"), earlier),
    make("div", { class: "card" }, make("h3", {}, "Evaluations"), rates.length ? table([["before step", true], ["incarnation", true], ["pass rate", true], ["pass@k", true], ["k", true]], rates, "Evaluations") : make("p", { class: "quiet" }, "None.")),
  ];
}

function recipes(content) {
  const { runs } = content;
  const rows = content.differences.map((row) => [make("code", {}, row.key), ...row.values.map((value) => value ?? "-")]);
  const differences = runs.length < 2 ? null : rows.length ? byRun(table([["setting", false], ...runs.map((run) => [run.name, false])], rows, "Differences of the recipes")) : make("p", { class: "quiet" }, "All settings are the same.");
  return make("section", {}, make("h2", {}, runs.length > 1 ? "Differences of the recipes" : "Recipe"),
    differences ? make("div", { class: "card" }, differences) : null,
    runs.map((run) => make("details", { class: "card" }, make("summary", {}, `${named(run, runs)}the whole recipe`), run.recipe ? make("pre", { tabindex: "0" }, run.recipe) : make("p", { class: "quiet" }, "Unknown."))));
}

// A sample's response, each piece in the colour of its lag; what an environment said has none. An agent's turn says which one
// it goes on after.
function sampleOf(sample) {
  const pieces = sample.pieces.flatMap((piece) => {
    const lag = piece.is_sampled ? `lag ${piece.lag}` : "the environment";
    const span = make("span", { title: `${lag}, version ${piece.version}` }, piece.text);
    if (piece.is_sampled) span.style.background = lagColour(piece.lag);
    return piece.note ? [make("span", { class: "quiet" }, `\n[${piece.note}]\n`), span] : [span];
  });
  const lags = [...new Set(sample.pieces.filter((piece) => piece.is_sampled).map((piece) => piece.lag))].sort((one, other) => one - other);
  const facts = [["sample", sample.tid], ["worker", sample.worker], ["ground truth", sample.truth], ["tokens", sample.tokens], ["ended by", sample.finish_reason], ["versions", [...new Set(sample.pieces.map((piece) => piece.version))].join(", ")]];
  return make("details", { class: "card" },
    make("summary", {}, `step ${figure(sample.step + 1)}, reward ${figure(sample.reward)}, lag ${lags.join(" and ")}: ${sample.prompt.slice(-60)}`),
    make("h3", {}, "Prompt"), make("pre", { class: "wrapped" }, sample.prompt),
    make("h3", {}, "Response"), make("pre", { class: "wrapped" }, pieces),
    make("ul", { class: "legend" }, lags.map((lag) => { const swatch = make("span", { class: "swatch" }); swatch.style.background = lagColour(lag); return make("li", {}, swatch, `lag ${lag}`); })),
    make("p", { class: "quiet" }, facts.map(([name, value]) => `${name}: ${figure(value)}`).join("; ")));
}

function lagColour(lag) {
  return `color-mix(in srgb, var(--c${lag % COLOURS}) 35%, transparent)`;
}

function samples(run) {
  if (!run.samples.length) return null;
  return make("section", { class: "samples" }, make("h2", {}, "Samples to read"),
    make("p", { class: "quiet" }, "The best and the worst sample of groups of the newest step and of the oldest one that the experience log holds."),
    make("div", { class: "grid" }, run.samples.map(sampleOf)));
}

// The functions that make the parts of the page, as many for every run: what comes before the look at the run, and after.
function leading({ runs }) {
  const single = runs.length === 1;
  return [
    () => (single ? heading(runs[0], true) : columns(runs, (run) => [heading(run, false)])),
    () => learning(runs),
    () => (single ? tiles(runs[0].summary) : make("div")),
  ];
}

function following(content) {
  const { runs } = content, single = runs.length === 1, none = () => make("div");
  const part = (title, of) => make("section", {}, make("h2", {}, title), columns(runs, of));
  return [
    () => (runs.some((run) => run.stages.length) ? part("Stages without workers", stagesOf) : none()),
    () => training(runs),
    () => (!isAsked && runs.some((run) => run.last_look) ? part("The last look at workers and queues", lastLook) : none()),
    () => part("Events and evaluations", events),
    () => (single && samples(runs[0])) || none(),
    () => make("section", {}, make("h2", {}, "Summary"), make("details", single ? { class: "card" } : { class: "card", open: "" }, make("summary", {}, "all figures"), summaries(runs))),
    () => recipes(content),
    () => make("p", { class: "quiet" }, `Made by Headway at ${content.made_at}.`),
  ];
}

const main = document.getElementById("page"), state = make("div"), first = make("div"), cards = make("div", { class: "grid live" }), rest = make("div");
let content = JSON.parse(document.getElementById("content").textContent);

let isAsked = false; // whether a broker has said how the run is now
const due = new Map();

function isSelected(part) {
  const selected = getSelection();
  return selected.type === "Range" && part.contains(selected.anchorNode);
}

// Makes `was` hold what `made` holds, and changes only what differs: focus, scrolling and open details stay as they are.
function merge(was, made) {
  const before = [...was.childNodes], after = [...made.childNodes];
  for (const child of before.splice(after.length)) child.remove();
  after.forEach((child, index) => mergeChild(was, before[index], child));
}

// Charts are replaced as a whole. A sample that is being read stays.
function mergeChild(parent, was, made) {
  if (was === undefined) parent.append(made);
  else if (was.nodeName !== made.nodeName) was.replaceWith(made);
  else if (was instanceof Text) { if (was.data !== made.data) was.data = made.data; }
  else if (was.matches("figure")) due.set(was, made);
  else if (!was.matches(".samples details[open]")) { mergeAttributes(was, made); merge(was, made); }
}

function mergeAttributes(was, made) {
  for (const { name, value } of made.attributes) if (name !== "style" && was.getAttribute(name) !== value) was.setAttribute(name, value);
  for (const { name } of [...was.attributes]) if (name !== "open" && !made.hasAttribute(name)) was.removeAttribute(name);
  if (made.hasAttribute("style") && was.style.cssText !== made.style.cssText) was.style.cssText = made.style.cssText;
}

// Replaces one chart in each frame. One that is being read stays until the reader leaves it.
function replaceCharts() {
  for (const [was, made] of due) {
    if (was.matches(":hover, :focus-within")) continue;
    due.delete(was);
    made.querySelector(".plot").repaint?.(Math.floor(was.querySelector(".plot").clientWidth));
    was.replaceWith(made);
    requestAnimationFrame(replaceCharts);
    return;
  }
}

function show() {
  const isEmpty = !content.runs.length, empty = () => make("p", { class: "quiet", role: "status" }, content.number === 0 ? "Reading the run's files." : "The run has no step yet.");
  for (const [host, parts] of [[first, isEmpty ? [empty] : leading(content)], [rest, isEmpty ? [] : following(content)]]) {
    if (!isSelected(host)) parts.forEach((part, index) => inTime(() => mergeChild(host, host.childNodes[index], part())));
  }
  inTime(replaceCharts);
}

const NEWEST_VERSIONS = 10;
const RATES = [["generated", "tokens/s generated"], ["trained", "tokens/s trained"]];

const CARDS = [
  workers, (live) => versions(live.versions), ({ status }) => agents(status.agents), ({ status }) => queues(status.queues), ({ status }) => lengths(status.tallies), ({ status }) => responses(status.tallies, content.runs[0]), ({ status }) => pools(status.pools),
  ({ status }) => faults(status.faults), ({ status }) => refused(status), lastEvents,
];

function showNow(live) {
  if (!isSelected(state)) merge(state, make("div", {}, stateNow(live)));
  if (live.status === null || isSelected(cards)) return;
  CARDS.forEach((card, index) => inTime(() => mergeChild(cards, cards.childNodes[index], card(live) ?? make("div", { hidden: "" }))));
  inTime(replaceCharts);
}

function stateNow(live) {
  const { status } = live;
  const parts = [make("div", {}, notes(live.problem ? [live.problem] : []))];
  if (status === null) return parts;
  const { waiting, last_step: step } = status, steps = step ? `${figure(step.step + 1)} of ${figure(step.total_steps)}` : "-";
  const tile = (name, value, ...more) => make("div", {}, make("dt", {}, name), make("dd", {}, figure(value)), ...more);
  parts.push(make("h1", {}, `${status.run} now `, make("span", { class: `badge ${status.state}` }, status.state)));
  parts.push(make("p", waiting?.is_quiet ? { class: "notes quiet-run", role: "status" } : { class: "quiet" }, waiting ? waiting.text : ""));
  parts.push(make("dl", { class: "tiles" },
    tile("step", steps), tile("version announced", status.announced), tile("workers", live.workers), tile("incarnation", status.incarnation),
    RATES.map(([key, name]) => tile(name, Math.round((live.rates[key] ?? [0]).at(-1)), make("dd", {}, sparkline(live.rates[key] ?? [0], name))))));
  parts.push(make("p", { class: "quiet" }, `Looked at ${live.at}. Tokens per second are means of 15 looks.`));
  return parts;
}

function box(title, ...inside) {
  return make("div", { class: "card" }, make("h3", {}, title), ...inside);
}

function workers(live) {
  const columns = [["worker", false], ["state", false], ["version", true], ["leases", true], ["tokens/s", true], ["last 2 minutes", false], ["sent", true], ["engine", false], ["error", false]];
  const count = live.workers, rows = live.status.workers.map((one) => [one.worker, stateOf(one), make("span", {}, one.version), make("span", {}, `${one.active}/${one.capacity}`), Math.round((live.worker_rates[one.worker] ?? [0]).at(-1)), sparkline(live.worker_rates[one.worker] ?? [0], `${one.worker}, tokens per second`), one.submitted, one.engine, make("span", {}, one.last_error)]);
  const shown = box(`Workers (${figure(count)})`, rows.length ? table(columns, rows, "Workers") : make("p", { class: "quiet" }, "None."), make("div", {}, lost(live.missing)), turning(live.first, rows.length, count));
  shown.classList.add("wide");
  return shown;
}

function stateOf(one) {
  if (!one.has_ended && !one.is_late) return one.state;
  return make("strong", { class: "late" }, one.has_ended ? "dead: its process ended" : `silent for ${Math.round(one.heard_s)} s`);
}

// Workers that do not say that they live; null if there are none.
function lost(missing) {
  const said = (one) => (one.has_ended ? "is dead: its process ended" : one.is_lost ? "is dead or cut off" : "is late");
  return notes(missing.map((one) => `${one.worker} on ${one.host} ${said(one)}; last heard of at ${one.since}.`));
}

// Buttons to the workers before and after those that are shown; null where all are.
function turning(first, shown, count) {
  if (shown >= count) return null;
  const turn = (name, to, isThere) => make("button", { type: "button", "data-first": to, ...(isThere ? {} : { disabled: "" }) }, name);
  return make("nav", { class: "turning", "aria-label": "Workers shown" },
    turn("Earlier workers", Math.max(0, first - shown), first > 0), " ", turn("Later workers", first + shown, first + shown < count), " ",
    make("span", { class: "quiet" }, `${figure(first + 1)} to ${figure(first + shown)} of ${figure(count)}, by name`));
}

function versions(all) {
  const rows = all.slice(0, NEWEST_VERSIONS).map((one) => [make("span", {}, one.version + (one.is_announced ? " (announced)" : "")), one.trained, one.trained_tokens, one.tokens_ready, one.groups_ready, one.groups_generating, one.generating, one.workers, one.groups_dropped]);
  const columns = [["version", false], ["samples trained", true], ["tokens trained", true], ["tokens ready", true], ["groups ready", true], ["groups generating", true], ["samples generating", true], ["workers", true], ["groups dropped", true]];
  const shown = box("Weight versions", table(columns, rows, "Weight versions"), make("p", { class: "quiet" }, "Groups and trained samples count under the oldest version that sampled them, tokens under their own; trained: in the last 20 steps."));
  shown.classList.add("wide");
  return shown;
}

function queues(depths) {
  const groups = [["waiting", depths.pool], ["generating", depths.open], ["ready", depths.ready], ["taken", depths.pinned], ["dropped", depths.dropped_stale], ["requeued", depths.requeued_stale]];
  const samples = [["samples waiting for a lease", depths.retry], ["samples leased", depths.leased], ["leases expired", depths.expired_leases], ["late or duplicate samples refused", depths.fenced], ["impossible samples refused", depths.rejected], ["megabytes stored", depths.payload_bytes / 1e6]];
  return box("Queues", table([["groups", false], ["number", true]], groups, "Groups"), table([["samples", false], ["number", true]], samples, "Samples"));
}

// Load may drop long prompts: then their share of what is trained falls behind their share of what is begun.
function lengths({ dispatched_by_prompt_length: begun, trained_by_prompt_length: trained }) {
  return shares("Groups by length of the prompt", [["begun", begun], ["trained", trained]]);
}

// Long responses may come too late: then their share of what is trained falls behind their share of what was finished.
function responses({ finished_by_response_length: finished, cut_by_response_length: cut }, run) {
  return shares("Responses by length", [["finished", finished], ["trained", run?.trained_by_response_length ?? {}], ["cut", cut]]);
}

// Counts by length, each with its share of all, and the shares as bars one above the other; null without a count.
function shares(title, kinds) {
  const sums = kinds.map(([, counts]) => Object.values(counts).reduce((sum, count) => sum + count, 0));
  const share = (index, length) => (sums[index] ? (100 * (kinds[index][1][length] ?? 0)) / sums[index] : 0);
  const known = [...new Set(kinds.flatMap(([, counts]) => Object.keys(counts)))].sort((one, other) => one - other);
  if (!known.length) return null;
  const rows = known.map((length) => [
    make("span", {}, length),
    ...kinds.flatMap(([, counts], index) => [counts[length] ?? 0, sums[index] ? `${Math.round(share(index, length))}%` : "-"]),
    make("div", {}, kinds.map((_, index) => barOf(index, share(index, length)))),
  ]);
  const columns = [["tokens up to", false], ...kinds.flatMap(([name]) => [[name, true], ["share", true]]), ["shares", false]];
  const legend = make("ul", { class: "legend" }, kinds.map(([name], index) => { const swatch = make("span", { class: "swatch" }); swatch.style.background = `var(--c${index})`; return make("li", {}, swatch, name); }));
  const shown = table(columns, rows, title);
  for (const row of shown.querySelectorAll("tr")) row.lastChild.className = "bars drift";
  return box(title, legend, shown);
}

function barOf(colour, percent) {
  const bar = make("div", { class: "bar", "aria-hidden": "true" });
  bar.style.width = `${percent}%`;
  bar.style.background = `var(--c${colour})`;
  return bar;
}

// What a look at the run showed last: its workers, versions and lengths, for a page that has no broker to ask.
function lastLook(run) {
  const { last_look: look } = run;
  if (!look) return [];
  const columns = [["worker", false], ["host", false], ["state", false], ["version", true], ["leases", true], ["tokens/s", true], ["sent", true], ["swaps", true], ["error", false]];
  const rows = look.workers.map((one) => [one.worker, one.host, one.state, make("span", {}, one.version), make("span", {}, `${one.active}/${one.capacity}`), Math.round(one.tokens_per_s), one.submitted, one.swaps, make("span", {}, one.last_error)]);
  const left = look.worker_count - rows.length;
  const shown = box(`Workers (${figure(look.worker_count)})`, rows.length ? table(columns, rows, "Workers") : make("p", { class: "quiet" }, "None."),
    make("p", { class: "quiet" }, `As the learner saw them after step ${figure(look.step + 1)}.${left ? ` ${figure(left)} more are left out.` : ""}`));
  shown.classList.add("wide");
  return [shown, versions(look.versions), lengths(look.tallies), responses(look.tallies, run)].filter((part) => part !== null);
}

// The episodes that agents play on all workers together; null in a run without an agent.
function agents(all) {
  if (!all) return null;
  const percent = (share) => (share === null ? "-" : `${figure(100 * share)}%`), reasons = (counts) => Object.entries(counts).map(([reason, count]) => [reason, count]);
  const now = [["open", all.episodes], ["requests running", all.running_requests], ["waiting for tools", all.waiting_for_tools], ["finished", all.finished]];
  const means = [["turns of a finished episode", all.turns_per_episode], ["seconds of tools a turn", all.tool_s_per_turn], ["turns that fork", percent(all.fork_fraction)], ["tokens re-read by forks", percent(all.reread_fraction)], ["turns unseen", all.unseen_turns], ["calls resumed", all.resumed_calls], ["calls repeated", all.repeated_calls], ["calls lost", all.lost_calls], ["episodes restarted", all.restarted], ["calls over budget", all.over_budget], ["calls over agent.turn_s", all.turn_timeouts]];
  const two = (title, label, rows) => (rows.length ? table([[title, false], ["number", true]], rows, label) : null);
  return box("Agents' episodes", ...[two("episodes", "Episodes", now), two("turns and calls", "Turns and calls", means), two("failed", "Failed episodes", reasons(all.failures)), two("refused", "Refused calls", reasons(all.refused_calls))].filter((part) => part !== null));
}

function pools(all) {
  if (!all.length) return null;
  return box("Pools", table([["pool", false], ["host", false], ["wanted", true], ["running", true], ["leaving", true], ["restarting", true], ["given up", true]], all.map((one) => [one.pool, one.host, one.wanted, one.running, one.leaving, one.restarting, one.given_up]), "Pools"));
}

function faults(found) {
  if (!found.length) return null;
  const rows = found.slice().reverse().map((one) => [one.worker, one.host, one.rule, make("span", {}, one.reason)]);
  return box("Workers that were set aside in the last hour", table([["worker", false], ["host", false], ["rule", false], ["why", false]], rows, "Workers that were set aside"));
}

function refused(status) {
  if (!status.quarantined.length && !status.dead_letters.length) return null;
  const rows = status.dead_letters.slice().reverse().map((one) => [one.tid, one.worker, make("span", {}, one.reason)]);
  const out = status.quarantined.length ? make("p", {}, `Quarantined, no more leases: ${status.quarantined.join(", ")}.`) : null;
  return box("Refused, and generated anew", ...[out, rows.length ? table([["sample", false], ["from", false], ["reason", false]], rows, "Refused samples") : null].filter((part) => part !== null));
}

function lastEvents() {
  const rows = content.runs.flatMap((run) => run.events).slice(-5).reverse().map((event) => [event.step, make("span", {}, event.text)]);
  return rows.length ? box("Last events", table([["step", true], ["what happened", false]], rows, "Last events")) : null;
}

let firstWorker = 0;

async function ask(name, asked = {}) {
  const query = new URLSearchParams([...new URLSearchParams(location.search), ...Object.entries(asked)]);
  const answer = await fetch(`${name}?${query}`, { cache: "no-store", signal: AbortSignal.timeout(10000) });
  if (!answer.ok) throw new Error(`the server answers ${answer.status}`);
  return answer.json();
}

async function look() {
  if (document.hidden) return;
  try {
    const live = await ask("live.json", { first: firstWorker });
    firstWorker = live.first;
    const wasAsked = isAsked;
    isAsked ||= live.status !== null;
    if (isAsked !== wasAsked) show();
    if (live.page !== content.number) { content = await ask("page.json"); show(); }
    showNow(live);
  } catch (error) {
    merge(state, make("div", {}, notes([`The dashboard does not answer (${error.message}). The page shows its last figures.`])));
    cards.replaceChildren();
  }
}

async function follow() {
  await look();
  setTimeout(follow, 1000);
}

cards.addEventListener("click", ({ target }) => {
  if (target.dataset.first === undefined) return;
  firstWorker = Number(target.dataset.first);
  look();
});
show();
main.replaceChildren(state, first, cards, rest);
document.addEventListener("visibilitychange", () => content.number !== undefined && look());
if (content.number !== undefined) follow();
