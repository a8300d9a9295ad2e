// The page shows one response at a time. Positions are code points, as in Python, not JavaScript's UTF-16 units.
"use strict";
const at = (id) => document.getElementById(id);
const names = { 1: "good", [-1]: "poor" };
let state, place, item, characters;
let moving = false;
let before = []; // the spans before each change of this response, for undo
let last = null; // the span that 1, 2, 3, f, d and x change if no span is selected
let sent = Promise.resolve(); // the last save
let queued = null; // a save that has not started
let typing, caret;

async function ask(path, body) {
  const headers = { "Content-Type": "application/json" };
  const request = fetch(path, body && { method: "POST", headers, body: JSON.stringify(body) });
  const answer = await request.catch(() => { throw new Error("t2g mark does not respond: start it again and open its new address"); });
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

function say(problem) {
  at("problem").textContent = problem;
  at("problem").hidden = !problem;
}

// Saves run one at a time; a change during a save is part of the next. Leaving the response waits for `sent`.
function save() {
  clearTimeout(typing);
  typing = null;
  at("saved").textContent = "saving";
  const mine = sent = queued ??= sent.catch(() => {}).then(() => {
    queued = null;
    const changed = item, { spans, done, version } = item;
    return ask(`item/${place}`, { critique: at("critique").value, spans, done, version })
      .then((answer) => { changed.version = answer.version; });
  });
  mine.catch(() => { if (sent === mine) at("saved").textContent = "not saved"; });
  return mine.then(() => { if (sent === mine) at("saved").textContent = "saved"; });
}

function reportError(promise) {
  promise.catch((error) => say(error.message));
}

async function show(next) {
  const fresh = await ask("state"), there = next ?? Math.max(0, fresh.finished.indexOf(false));
  const loaded = await ask(`item/${there}`);
  [state, place, item] = [fresh, there, loaded];
  characters = [...item.response];
  before = [];
  last = null;
  at("prompt").textContent = item.prompt;
  at("prompt").scrollTop = 0;
  at("response").textContent = item.response;
  at("critique").value = item.critique;
  const count = state.finished.filter(Boolean).length, total = state.finished.length;
  at("progress").textContent = `${state.by}: response ${place + 1} of ${total}, ${count} finished`;
  at("saved").textContent = "";
  at("finished").textContent = item.done ? "(finished)" : "";
  at("agreements").textContent = state.agreements.join("; ");
  draw();
  at("response").focus();
  getSelection().collapse(at("response").firstChild, 0);
  caret = getSelection().getRangeAt(0).cloneRange();
}

function draw() {
  CSS.highlights.clear();
  const unit = (character) => characters.slice(0, character).join("").length;
  at("spans").replaceChildren();
  for (const span of item.spans) {
    const range = new StaticRange({
      startContainer: at("response").firstChild, startOffset: unit(span.start),
      endContainer: at("response").firstChild, endOffset: unit(span.end),
    });
    const name = names[span.label], group = name + span.severity, line = document.createElement("li");
    if (!CSS.highlights.has(group)) CSS.highlights.set(group, new Highlight());
    CSS.highlights.get(group).add(range);
    line.textContent = `${name} ${span.severity}: ${characters.slice(span.start, span.end).join("")}`;
    if (span.fix != null) line.textContent += ` → ${span.fix || "(delete)"}`;
    line.className = span === last ? `${name} active` : name;
    at("spans").append(line);
  }
}

// The selected characters of the response, half-open, without blanks at the ends; null for a selection elsewhere.
function selected() {
  const selection = getSelection(), response = at("response");
  if (!selection.rangeCount || !response.contains(selection.getRangeAt(0).commonAncestorContainer)) return null;
  const range = selection.getRangeAt(0), head = document.createRange();
  head.selectNodeContents(response);
  head.setEnd(range.startContainer, range.startOffset);
  let start = [...head.toString()].length;
  let end = start + [...range.toString()].length;
  while (start < end && !characters[start].trim()) start++;
  while (start < end && !characters[end - 1].trim()) end--;
  return { start, end };
}

function change(spans, now) {
  before.push(item.spans);
  item.spans = spans.sort((a, b) => a.start - b.start);
  last = now;
  draw();
  reportError(save());
}

// A new span replaces the spans that it overlaps.
function mark(label) {
  const range = selected();
  if (!range || range.start === range.end) return say("select some words of the response first");
  const disjoint = item.spans.filter((span) => span.end <= range.start || range.end <= span.start);
  const span = { ...range, label, severity: 1 };
  change([...disjoint, span], span);
  getSelection().collapseToEnd();
}

function currentSpan() {
  const range = selected();
  const under = range && item.spans.filter((span) => span.start <= range.start && range.end <= span.end);
  return under?.length ? under[0] : last;
}

function setSeverity(severity) {
  const old = currentSpan();
  if (!old) return say("mark something first, or put the caret into a mark");
  replace(old, { severity });
}

function replace(old, values) {
  const span = { ...old, ...values };
  change(item.spans.map((s) => (s === old ? span : s)), span);
}

// Set the fix of a poor span: "" deletes it, undefined is none. Without a value, type it.
function fix(value) {
  const old = currentSpan();
  if (old?.label !== -1) return say("mark something as poor first, or put the caret into a poor mark");
  replace(old, { fix: value ?? old.fix });
  if (value !== undefined) return;
  caret = getSelection().getRangeAt(0).cloneRange();
  at("fix").hidden = false;
  at("fix").value = old.fix ?? "";
  at("fix").focus();
}

function remove() {
  const old = currentSpan();
  if (!old) return say("put the caret into a mark");
  change(item.spans.filter((span) => span !== old), null);
}

function undo() {
  if (!before.length) return say("nothing to undo");
  item.spans = before.pop();
  last = null;
  draw();
  reportError(save());
}

async function finish() {
  if (!at("critique").value.trim()) return say("a critique is missing: c goes there");
  item.done = true;
  await save();
  state.finished[place] = true;
  const open = [...state.finished.keys()].filter((index) => !state.finished[index]);
  await show(open.find((index) => index > place) ?? open[0] ?? (place + 1) % state.finished.length);
  if (!open.length) at("progress").textContent += ": that was the last one";
}

async function go(step) {
  await (typing ? save() : sent); // a click on a button leaves the critique without a change event
  await show((place + step + state.finished.length) % state.finished.length);
}

// Move the focus to the response, at the former caret.
function back() {
  at("response").focus();
  getSelection().removeAllRanges();
  getSelection().addRange(caret);
}

// Go to another response; ignored while a move is in progress.
function move(action) {
  if (moving) return;
  moving = true;
  reportError(action().finally(() => { moving = false; }));
}

const keys = {
  g: () => mark(1), p: () => mark(-1), 1: () => setSeverity(1), 2: () => setSeverity(2), 3: () => setSeverity(3), x: remove, u: undo,
  f: () => fix(), d: () => fix(""),
  c: () => { caret = getSelection().getRangeAt(0).cloneRange(); at("critique").focus(); }, n: () => move(finish), enter: () => move(finish),
  s: () => move(() => go(1)), b: () => move(() => go(-1)),
};

// Clear the previous error, then run the key's action.
function act(key) {
  say("");
  keys[key]();
}

document.addEventListener("keydown", (event) => {
  const key = event.key.toLowerCase(), ours = Object.hasOwn(keys, key);
  if (event.target === at("fix")) {
    if (["escape", "enter"].includes(key) && !event.isComposing) { event.preventDefault(); back(); }
  } else if (event.target === at("critique")) {
    if (key === "escape") back();
    if (key === "enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); act("n"); }
  } else if (ours && !event.ctrlKey && !event.metaKey && !event.altKey && event.target.tagName !== "BUTTON") {
    event.preventDefault();
    act(key);
  }
});
for (const kind of ["beforeinput", "paste", "cut", "drop", "dragstart"])
  at("response").addEventListener(kind, (event) => event.preventDefault());
// Input methods cannot be prevented from writing into the response: restore its text.
at("response").addEventListener("input", () => { at("response").textContent = item.response; draw(); });
function saveSoon() {
  say("");
  at("saved").textContent = "saving";
  clearTimeout(typing);
  typing = setTimeout(() => reportError(save()), 300);
}
at("critique").addEventListener("input", saveSoon);
at("fix").addEventListener("input", () => { // undo takes back the whole fix: `fix` has kept the spans before it
  const span = { ...last, fix: at("fix").value || undefined };
  item.spans = item.spans.map((s) => (s === last ? span : s));
  last = span;
  draw();
  saveSoon();
});
at("fix").addEventListener("blur", () => { at("fix").hidden = true; });
at("critique").addEventListener("change", () => reportError(save()));
for (const button of document.querySelectorAll("#keys button")) {
  button.addEventListener("mousedown", (event) => event.preventDefault()); // the selection stays
  button.addEventListener("click", () => act(button.dataset.key));
}
addEventListener("beforeunload", (event) => { if (["saving", "not saved"].includes(at("saved").textContent)) event.preventDefault(); });
reportError(show());
