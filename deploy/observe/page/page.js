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

function rewards(runs) {
  if (runs.length > 1) return each(runs, "reward_average");
  const [run] = runs, rates = run.evaluations;
  return [
    drawn(run, "reward_mean", 0, "each step", { faint: true }),
    drawn(run, "reward_average", 0, "mean of 5 steps", { low: [], high: [] }),
    { name: "held-out pass rate", colour: 1, dots: true, xs: rates.map((rate) => rate.step), ys: rates.map((rate) => rate.pass_rate) },
  ];
}

function passRates(runs) {
  return runs.map((run, index) => ({
    name: run.name, colour: index, dots: true, xs: run.evaluations.map((rate) => rate.step), ys: run.evaluations.map((rate) => rate.pass_rate),
  }));
}

function learning(runs) {
  const marks = marksOf(runs), many = runs.length > 1;
  const charts = [
    curves(many ? "Reward, mean of 5 steps" : "Reward", rewards(runs), { marks, from: 0, to: 1, note: "over steps" }),
    curves("Loss", each(runs, "loss", "loss"), { marks, note: "over steps" }),
    curves("Gradient norm", each(runs, "grad_norm", "norm"), { marks, note: "over steps" }),
    curves("Tokens per response", each(runs, "response_tokens_mean", "mean"), { marks, from: 0, note: "over steps" }),
    curves("Trained tokens per second", each(runs, "trained_tokens_per_s", "tokens/s"), { marks, from: 0, note: "waiting included" }),
  ];
  if (many) charts.push(curves("Held-out pass rate", passRates(runs), { from: 0, to: 1 }), curves("Mean lag", each(runs, "lag_mean"), { from: 0, note: "in steps" }));
  return make("section", {}, make("h2", {}, "Learning"), make("div", { class: "grid" }, charts));
}

// One chart for the loss of a stage without workers, and one for each figure of held-out records or prompts.
function stagesOf(run, prefix) {
  return run.stages.flatMap((stage) => {
    const line = (name, text, colour) => ({ name: text, colour, xs: stage.steps, ys: stage.curves[name].mean, low: stage.curves[name].low, high: stage.curves[name].high });
    const losses = ["loss", "held_out/loss"].filter((name) => name in stage.curves);
    const others = Object.keys(stage.curves).filter((name) => !losses.includes(name));
    const note = "over steps of the stage";
    return [
      curves(`${prefix}${stage.name}: loss`, losses.map((name, index) => line(name, name === "loss" ? "trained" : "held out", index)), { note }),
      ...others.map((name) => curves(`${prefix}${stage.name}: ${name}`, [line(name, name, 1)], { note })),
    ];
  });
}

function lagOf(run, prefix) {
  const lines = [drawn(run, "lag_mean", 2, "mean", { low: [], high: [] }), { ...drawn(run, "lag_max", 4, "largest"), ys: run.curves.lag_max.high.length ? run.curves.lag_max.high : run.curves.lag_max.mean, low: [], high: [] }];
  for (const line of lines) line.xs = line.xs.map((step) => step + 0.5);
  const note = "Shade: the share of a step's trajectories, by the lag of their oldest trained token. Dashes: the bound.";
  return [heatMap(`${prefix}Lag over steps`, run.lag, lines, { bound: run.max_lag, note }), histogram(run.lag, `${prefix}Trained sequences by lag`)];
}

function histogram(map, title) {
  const largest = Math.max(...map.totals, 1), rows = map.rows.map((row, index) => {
    const bar = make("div", { class: "bar" });
    bar.style.width = `${(100 * map.totals[index]) / largest}%`;
    return [rowName(row), map.totals[index], bar];
  });
  const shown = table([["lag", true], ["trajectories", true], ["share", false]], rows, title);
  for (const row of shown.querySelectorAll("tr")) row.lastChild.className = "bars";
  return make("div", { class: "card" }, make("h3", {}, title), shown);
}

function phasesOf(run, prefix) {
  const series = PHASES.map(([key, name, colour]) => ({ name, colour, ys: run.phases.seconds[key] }));
  return stackedBars(`${prefix}Seconds of a step`, run.phases.first, run.phases.last, series);
}

function named(run, runs) {
  return runs.length > 1 ? `${run.name}: ` : "";
}

function tiles(summary) {
  const shown = TILES.filter(([key]) => summary[key] !== undefined && summary[key] !== null);
  return make("dl", { class: "tiles" }, shown.map(([key, name, format = figure]) => make("div", {}, make("dt", {}, name), make("dd", {}, typeof summary[key] === "number" ? format(summary[key]) : figure(summary[key])))));
}

function heading(run) {
  return make("header", {},
    make(content.number === undefined ? "h1" : "h2", {}, run.name, " ", make("span", { class: `badge ${run.state === "running" ? "running" : ""}` }, run.state)),
    make("p", { class: "quiet" }, run.directory),
    notes(run.notes));
}

function notes(sentences) {
  return sentences.length ? make("ul", { class: "notes", role: "status" }, sentences.map((sentence) => make("li", {}, sentence))) : null;
}

function summaries(runs) {
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.summary)))];
  const columns = [["figure", false], ...runs.map((run) => [run.name, true])];
  return table(columns, keys.map((key) => [key, ...runs.map((run) => run.summary[key])]), "Summary figures");
}

function events(run, runs) {
  const rows = run.events.slice().reverse().map((event) => [event.step, event.kind, make("span", {}, event.text)]);
  const earlier = run.earlier_events ? make("p", { class: "quiet" }, `${figure(run.earlier_events)} earlier events are left out.`) : null;
  const rates = run.evaluations.map((rate) => [rate.step, rate.incarnation, rate.pass_rate, rate.pass_at_k ?? "-", rate.samples ?? "-"]);
  return [
    make("div", { class: "card" }, make("h3", {}, `${named(run, runs)}Events`), table([["step", true], ["event", false], ["what happened", false]], rows, "Events"), earlier),
    make("div", { class: "card" }, make("h3", {}, `${named(run, runs)}Evaluations`), rates.length ? table([["before step", true], ["incarnation", true], ["pass rate", true], ["pass@k", true], ["k", true]], rates, "Evaluations") : make("p", { class: "quiet" }, "None.")),
  ];
}

function recipes(content) {
  const { runs } = content;
  const rows = content.differences.map((row) => [make("code", {}, row.key), ...row.values.map((value) => value ?? "-")]);
  const differences = runs.length < 2 ? null : rows.length ? table([["setting", false], ...runs.map((run) => [run.name, false])], rows, "Differences of the recipes") : make("p", { class: "quiet" }, "All settings are the same.");
  return make("section", {}, make("h2", {}, runs.length > 1 ? "Differences of the recipes" : "Recipe"),
    differences ? make("div", { class: "card" }, differences) : null,
    runs.map((run) => make("details", { class: "card" }, make("summary", {}, `${named(run, runs)}the whole recipe`), run.recipe ? make("pre", { tabindex: "0" }, run.recipe) : make("p", { class: "quiet" }, "Unknown."))));
}

// A sample's response, each piece in the colour of its lag; what an environment said has none.
function sampleOf(sample) {
  const pieces = sample.pieces.map((piece) => {
    const lag = piece.is_sampled ? `lag ${piece.lag}` : "the environment";
    const span = make("span", { title: `${lag}, version ${piece.version}` }, piece.text);
    if (piece.is_sampled) span.style.background = lagColour(piece.lag);
    return span;
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

// The functions that make the parts of the page, as many for every run.
function report(content) {
  const { runs } = content, single = runs.length === 1, none = () => make("div");
  const cards = (title, of) => make("section", {}, make("h2", {}, title), make("div", { class: "grid" }, runs.flatMap(of)));
  return [
    () => (single ? heading(runs[0]) : make("div", { class: "grid" }, runs.map((run) => make("div", { class: "card" }, heading(run))))),
    () => (single ? tiles(runs[0].summary) : none()),
    () => (runs.some((run) => run.stages.length) ? cards("Stages without workers", (run) => stagesOf(run, named(run, runs))) : none()),
    () => learning(runs),
    () => cards("Lag and time", (run) => [...lagOf(run, named(run, runs)), phasesOf(run, named(run, runs))]),
    () => (!isAsked && runs.some((run) => run.last_look) ? cards("The last look at workers and queues", (run) => lastLook(run, named(run, runs))) : none()),
    () => cards("Events and evaluations", (run) => events(run, runs)),
    () => (single && samples(runs[0])) || none(),
    () => make("section", {}, make("h2", {}, "Summary"), make("details", single ? { class: "card" } : { class: "card", open: "" }, make("summary", {}, "all figures"), summaries(runs))),
    () => recipes(content),
    () => make("p", { class: "quiet" }, `Made by Headway at ${content.made_at}.`),
  ];
}

const main = document.getElementById("page"), state = make("div"), cards = make("div", { class: "grid live" }), now = make("div", {}, state, cards), body = make("div");
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
  const parts = content.runs.length ? report(content) : [() => make("p", { class: "quiet", role: "status" }, content.number === 0 ? "Reading the run's files." : "The run has no step yet.")];
  if (isSelected(body)) return;
  parts.forEach((part, index) => inTime(() => mergeChild(body, body.childNodes[index], part())));
  inTime(replaceCharts);
}

const NEWEST_VERSIONS = 10;
const RATES = [["generated", "tokens/s generated"], ["trained", "tokens/s trained"]];

const CARDS = [
  workers, (live) => versions(live.versions), ({ status }) => queues(status.queues), ({ status }) => lengths(status.tallies), ({ status }) => responses(status.tallies, content.runs[0]), ({ status }) => pools(status.pools),
  ({ status }) => faults(status.faults), ({ status }) => refused(status), lastEvents,
];

function showNow(live) {
  if (isSelected(now)) return;
  merge(state, make("div", {}, stateNow(live)));
  if (live.status === null) return;
  CARDS.forEach((card, index) => inTime(() => mergeChild(cards, cards.childNodes[index], card(live) ?? make("div", { hidden: "" }))));
  inTime(replaceCharts);
}

function stateNow(live) {
  const { status } = live;
  const parts = [make("p", { class: "quiet" }, `Looked at ${live.at}.`), make("div", {}, notes(live.problem ? [live.problem] : []))];
  if (status === null) return parts;
  const { waiting, last_step: step } = status, steps = step ? `${figure(step.step + 1)} of ${figure(step.total_steps)}` : "-";
  const tile = (name, value, ...more) => make("div", {}, make("dt", {}, name), make("dd", {}, figure(value)), ...more);
  parts.push(make("h1", {}, `${status.run} now `, make("span", { class: `badge ${status.state}` }, status.state)));
  parts.push(make("p", waiting?.is_quiet ? { class: "notes quiet-run", role: "status" } : { class: "quiet" }, waiting ? waiting.text : ""));
  parts.push(make("dl", { class: "tiles" },
    tile("step", steps), tile("version announced", status.announced), tile("workers", live.workers), tile("incarnation", status.incarnation),
    RATES.map(([key, name]) => tile(name, Math.round((live.rates[key] ?? [0]).at(-1)), make("dd", {}, sparkline(live.rates[key] ?? [0], name))))));
  return parts;
}

function box(title, ...inside) {
  return make("div", { class: "card" }, make("h3", {}, title), ...inside);
}

function workers(live) {
  const columns = [["worker", false], ["state", false], ["version", true], ["leases", true], ["tokens/s", true], ["last 2 minutes", false], ["sent", true], ["engine", false], ["error", false]];
  const count = live.workers, rows = live.status.workers.map((one) => [one.worker, stateOf(one), make("span", {}, one.version), make("span", {}, `${one.active}/${one.capacity}`), Math.round(one.tokens_per_s), sparkline(live.worker_rates[one.worker] ?? [0], `${one.worker}, tokens per second`), one.submitted, one.engine, make("span", {}, one.last_error)]);
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

function versions(all, prefix = "") {
  const rows = all.slice(0, NEWEST_VERSIONS).map((one) => [make("span", {}, one.version + (one.is_announced ? " (announced)" : "")), one.workers, one.generating, one.groups_generating, one.groups_ready, one.tokens_ready, one.trained, one.trained_tokens, one.groups_dropped]);
  const columns = [["version", false], ["workers", true], ["their samples", true], ["groups generating", true], ["ready", true], ["tokens ready", true], ["samples trained", true], ["tokens trained", true], ["groups dropped", true]];
  const shown = box(`${prefix}Weight versions`, table(columns, rows, "Weight versions"), make("p", { class: "quiet" }, "Groups and trained samples count under the oldest version that sampled them, tokens under their own; trained: in the last 20 steps."));
  shown.classList.add("wide");
  return shown;
}

function queues(depths) {
  const groups = [["waiting", depths.pool], ["generating", depths.open], ["ready", depths.ready], ["taken", depths.pinned], ["dropped", depths.dropped_stale], ["requeued", depths.requeued_stale]];
  const samples = [["samples waiting for a lease", depths.retry], ["samples leased", depths.leased], ["leases expired", depths.expired_leases], ["late or duplicate samples refused", depths.fenced], ["impossible samples refused", depths.rejected], ["megabytes stored", depths.payload_bytes / 1e6]];
  return box("Queues", table([["groups", false], ["number", true]], groups, "Groups"), table([["samples", false], ["number", true]], samples, "Samples"));
}

// Load may drop long prompts: then their share of what is trained falls behind their share of what is begun.
function lengths({ dispatched_by_prompt_length: begun, trained_by_prompt_length: trained }, prefix = "") {
  return shares(`${prefix}Groups by length of the prompt`, [["begun", begun], ["trained", trained]]);
}

// Long responses may come too late: then their share of what is trained falls behind their share of what was finished.
function responses({ finished_by_response_length: finished, cut_by_response_length: cut }, run, prefix = "") {
  return shares(`${prefix}Responses by length`, [["finished", finished], ["trained", run?.trained_by_response_length ?? {}], ["cut", cut]]);
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
function lastLook(run, prefix) {
  const { last_look: look } = run;
  if (!look) return [];
  const columns = [["worker", false], ["host", false], ["state", false], ["version", true], ["leases", true], ["tokens/s", true], ["sent", true], ["swaps", true], ["error", false]];
  const rows = look.workers.map((one) => [one.worker, one.host, one.state, make("span", {}, one.version), make("span", {}, `${one.active}/${one.capacity}`), Math.round(one.tokens_per_s), one.submitted, one.swaps, make("span", {}, one.last_error)]);
  const left = look.worker_count - rows.length;
  const shown = box(`${prefix}Workers (${figure(look.worker_count)})`, rows.length ? table(columns, rows, "Workers") : make("p", { class: "quiet" }, "None."),
    make("p", { class: "quiet" }, `As the learner saw them after step ${figure(look.step + 1)}.${left ? ` ${figure(left)} more are left out.` : ""}`));
  shown.classList.add("wide");
  return [shown, versions(look.versions, prefix), lengths(look.tallies, prefix), responses(look.tallies, run, prefix)].filter((part) => part !== null);
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

now.addEventListener("click", ({ target }) => {
  if (target.dataset.first === undefined) return;
  firstWorker = Number(target.dataset.first);
  look();
});
show();
main.replaceChildren(now, body);
document.addEventListener("visibilitychange", () => content.number !== undefined && look());
if (content.number !== undefined) follow();
