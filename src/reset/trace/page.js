"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const { trace, summary, step_means_nats: stepMeans, at_t_high: atHigh } =
    JSON.parse(byId("trace-data").textContent);
  const { tokens, policy } = trace;
  const isFixed = policy.policy === "fixed";
  const kindOf = (i) => (isFixed ? "fixed" : atHigh[i] ? "high" : "low");

  // ---- building blocks: text enters the document as text nodes only ---------------------------
  function el(tag, className, ...children) {
    const node = document.createElement(tag);
    if (className) node.className = className;
    node.append(...children);
    return node;
  }
  // "tau_t" -> τ with the subscript t; for the page's own words, never for text of the trace.
  function rich(text) {
    const out = document.createDocumentFragment();
    for (const part of text.split(/((?:H|T|tau)_\w+)/)) {
      const [, name, index] = /^(H|T|tau)_(\w+)$/.exec(part) || [];
      if (name) out.append(name === "tau" ? "τ" : name, el("sub", "", index));
      else out.append(part);
    }
    return out;
  }
  // Rounding may leave -1e-8 nats; "-0.000" would puzzle.
  // Small ones keep two digits: sure models have means of 0.00008.
  function num(x, digits = 3) {
    if (x === null) return "—";
    const fixed = Math.max(x, 0).toFixed(digits);
    return Number(fixed) === 0 && x > 1e-6 ? x.toFixed(2 - Math.floor(Math.log10(x)) - 1) : fixed;
  }
  const percent = (p) => (p >= 0.9995 ? (100 * p).toFixed(2) : (100 * p).toPrecision(3)) + " %";
  // Two numbers that differ must not look equal.
  function pair(a, b) {
    let digits = 3;
    while (a !== b && a.toFixed(digits) === b.toFixed(digits) && digits < 9) digits += 1;
    return [a.toFixed(digits), b.toFixed(digits)];
  }
  // Float32 values as they were written: 0.10000000149 is 0.1.
  const short = (x) => String(Number(x.toPrecision(6)));
  const degree = (x) =>
    (Number.isInteger(x) ? x.toFixed(1) : short(x)) + (x <= 1e-6 ? " (argmax)" : "");

  // ---- header ---------------------------------------------------------------------------------
  function fillHeader() {
    document.title = `${trace.model} · ReSET trace`;
    byId("model").textContent = trace.model;
    const tiles = [["tokens", summary.tokens], ["steps", summary.steps]];
    if (summary.share_t_high !== null)
      tiles.push(["sampled at T_high", `${(100 * summary.share_t_high).toFixed(1)} %`]);
    tiles.push(["mean entropy, nats", num(summary.mean_entropy_nats)]);
    if (summary.tokens_per_second !== null)
      tiles.push(["tokens/s", short(Number(summary.tokens_per_second.toPrecision(3)))]);
    for (const [name, value] of tiles)
      byId("summary").append(el("div", "", el("dt", "", rich(name)), el("dd", "", String(value))));

    const facts = [["policy", policy.policy]];
    if (isFixed) facts.push(["temperature", degree(policy.base_temp)]);
    else {
      facts.push(["estimator", policy.estimator], ["T_low", degree(policy.t_low)],
        ["T_high", degree(policy.t_high)]);
      if (policy.tau_0 !== null) facts.push(["tau_0", `${short(policy.tau_0)} nats`]);
      facts.push(["window", `${policy.window} tokens`]);
    }
    facts.push(["seed", trace.seed === null ? "not set" : String(trace.seed)]);
    facts.push(["ended by", trace.finish_reason === "stop" ? "the model" : "the token limit"]);
    for (const [name, value] of facts)
      byId("policy").append(el("div", "", el("dt", "", rich(name)), el("dd", "", value)));

    document.querySelector(".prompt").textContent = trace.prompt;
    byId("prompt").open = trace.prompt.length < 400;
    byId("versions").textContent =
      Object.entries(trace.versions).map(([name, version]) => `${name} ${version}`).join(" · ");
    fillRules();
  }

  const estimators = {
    hybrid: `mean of the last ${policy.window} entropies while the step holds fewer tokens than ` +
      "that, then the mean of the step itself",
    window: `mean of the last ${policy.window} entropies`,
    causal: "mean of the step's entropies so far",
    ema: `moving average with weight 2 / (${policy.window} + 1)`,
  };
  const thresholds = {
    reset: "tau_0 in a confident step (H_step ≤ H_bar), H_step in an uncertain one (H_step > H_bar)",
    threshold: "tau_0 for every token",
    sliding: `mean of the last ${policy.window} entropies`,
    relative: "H_step for every token",
    uniform: "none in a confident step (H_step ≤ H_bar): all T_low; H_step in an uncertain one",
    fixed: "none",
  };
  function fillRules() {
    const rules = [
      ["H_t", "entropy of the distribution that this token was drawn from"],
      ["H_step", "entropy of the current step: " + (estimators[policy.estimator] || policy.estimator)],
      ["H_bar", "mean of all entropies before this token"],
      ["tau_t", "threshold: " + (thresholds[policy.policy] || policy.policy)],
      ["T_t", isFixed ? "the same temperature for every token" :
        "T_low if H_t < tau_t, else T_high"],
    ];
    for (const [name, text] of rules)
      byId("rules").append(el("dt", "", rich(name)), el("dd", "", rich(text)));
  }

  // ---- legends --------------------------------------------------------------------------------
  function sample(className, d, width) {
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    path.setAttribute("class", className);
    path.setAttribute("d", d);
    if (width) path.setAttribute("stroke-width", width);
    svg.setAttribute("aria-hidden", "true");
    svg.append(path);
    return svg;
  }
  function fillLegends() {
    const bars = "M4 12V5M12 12V1M20 12V4";
    const line = "M0 6H24";
    const series = isFixed
      ? [["bars-low", bars, "H_t"]]
      : [["bars-low", bars, "H_t at T_low"], ["bars-high", bars, "H_t at T_high"],
         ["line-tau", line, "tau_t threshold"]];
    series.push(["line-step", line, "H_step this step"], ["line-mean", line, "H_bar so far"]);
    if (summary.steps > 1) series.push(["borders", "M12 0V12", "step border"]);
    for (const [className, d, text] of series)
      byId("chart-legend").append(el("li", "", sample(className, d, d === bars ? 4 : 0), rich(text)));

    const entry = (className, word, text) =>
      byId("text-legend").append(el("li", "", el("span", className, word), rich(text)));
    if (isFixed) entry("t fixed", "token", `T = ${degree(policy.base_temp)}`);
    else {
      entry("t low", "token", `T_low ${degree(policy.t_low)}: H_t < tau_t`);
      entry("t high", "token", `T_high ${degree(policy.t_high)}: H_t ≥ tau_t`);
    }
    const has = (test) => tokens.some((token) => test(token.text));
    if (has((text) => text.includes("\n"))) entry("newline", "", " line break");
    if (has((text) => text === "")) entry("empty", "", " token without text");
    if (has((text) => text.includes("\ufffd"))) entry("partial", "\ufffd", " part of a character");
  }

  // ---- the text -------------------------------------------------------------------------------
  const spans = [];
  function fillText() {
    const counts = stepMeans.map(() => 0);
    for (const token of tokens) counts[token.step] += 1;
    const bodies = stepMeans.map((mean, step) => {
      const body = el("div", "words");
      const margin = el("div", "margin", el("b", "", `Step ${step + 1}`),
        el("span", "", `mean ${num(mean, 2)} nats`), el("br"),
        el("span", "", `${counts[step]} token${counts[step] === 1 ? "" : "s"}`));
      const section = el("section", step ? "step bordered" : "step", margin, body);
      section.setAttribute("aria-label", `Step ${step + 1}, mean entropy ${num(mean, 2)} nats`);
      byId("steps").append(section);
      return body;
    });
    for (const token of tokens) {
      const span = el("span", `t ${kindOf(token.position)}`);
      token.text.split("\n").forEach((piece, row) => {
        if (row) span.append(el("span", "newline"), "\n");
        span.append(piece);
      });
      // The border already parts the steps: the blank line that ends one is shown as marks alone.
      if (token.ends_step && !token.text.trimEnd().includes("\n")) span.classList.add("last");
      if (token.text === "") span.classList.add("empty");
      if (token.text.includes("\ufffd")) span.classList.add("partial");
      span.dataset.position = token.position;
      span.tabIndex = token.position ? -1 : 0;
      spans.push(span);
      bodies[token.step].append(span);
    }
    if (!tokens.length) byId("steps").append("The model produced no token.");
  }

  // ---- the chart: one path per series, redrawn only when size or range change ------------------
  const chart = byId("chart");
  const part = (name) => chart.querySelector(`[data-part=${name}], [data-series=${name}]`);
  const highest = tokens.reduce((top, t) =>
    Math.max(top, t.entropy_nats, t.step_entropy_nats, t.mean_entropy_nats, t.threshold_nats), 0);
  const yMax = highest > 0 ? highest * 1.06 : 1;
  let view = { from: 0, to: Math.max(tokens.length, 1) };
  let plot = {};

  function niceStep(range, count) {
    const rough = range / Math.max(count, 1);
    const unit = 10 ** Math.floor(Math.log10(rough));
    return [1, 2, 5, 10].map((k) => k * unit).find((step) => step >= rough);
  }
  const tick = (k) => String(Number((k * niceStep(yMax, 4)).toPrecision(6)));
  const x = (position) => plot.left + (position - view.from) * plot.slot;
  const y = (nats) => plot.bottom - (nats / yMax) * (plot.bottom - plot.top);

  function label(text, atX, atY, anchor, turn) {
    const node = document.createElementNS("http://www.w3.org/2000/svg", "text");
    node.textContent = text;
    node.setAttribute("x", atX);
    node.setAttribute("y", atY);
    node.setAttribute("text-anchor", anchor);
    if (turn) node.setAttribute("transform", `rotate(-90 ${atX} ${atY})`);
    part("labels").append(node);
  }
  function drawChart() {
    const width = chart.clientWidth, height = chart.clientHeight;
    const widest = Math.max(4, ...[1, 2, 3].map((k) => tick(k).length));  // characters of 7 pixels
    plot = { left: 48 + 7 * (widest - 4), right: width - 8, top: 20, bottom: height - 38 };
    plot.slot = (plot.right - plot.left) / (view.to - view.from);
    const shown = tokens.slice(view.from, view.to);

    for (const [name, high, share] of [["entropy-low", false, 0.5], ["entropy-high", true, 0.75]]) {
      const d = shown.filter((t) => atHigh[t.position] === high).map((t) =>
        `M${x(t.position + 0.5).toFixed(1)} ${plot.bottom}V${y(t.entropy_nats).toFixed(1)}`);
      part(name).setAttribute("d", d.join(""));
      part(name).setAttribute("stroke-width", Math.min(Math.max(plot.slot * share, 0.7), 10));
    }
    for (const [name, field] of [["threshold", "threshold_nats"], ["step", "step_entropy_nats"],
                                 ["mean", "mean_entropy_nats"]]) {
      let d = "", joined = false;
      for (const t of shown) {
        if (t[field] !== null)
          d += `${joined ? "L" : "M"}${x(t.position).toFixed(1)} ${y(t[field]).toFixed(1)}` +
            `H${x(t.position + 1).toFixed(1)}`;
        joined = t[field] !== null;
      }
      part(name).setAttribute("d", d);
    }
    drawAxes(shown, width, height);
    drawCursor();
  }
  function drawAxes(shown, width, height) {
    part("labels").replaceChildren();
    let grid = "";
    const yStep = niceStep(yMax, 4);
    for (let k = 0; k * yStep <= yMax; k += 1) {
      grid += `M${plot.left} ${y(k * yStep).toFixed(1)}H${plot.right}`;
      label(tick(k), plot.left - 7, y(k * yStep) + 4, "end");
    }
    part("grid").setAttribute("d", grid);
    const xStep = Math.max(1, niceStep(view.to - view.from, width / 90));
    for (let p = Math.ceil(view.from / xStep) * xStep; p < view.to; p += xStep)
      label(String(p), x(p + 0.5), plot.bottom + 15, "middle");
    label("output position (tokens)", (plot.left + plot.right) / 2, height - 6, "middle");
    label("entropy (nats)", 12, (plot.top + plot.bottom) / 2, "middle", true);

    let borders = "";
    const [from, to] = shown.length ? [shown[0].step, shown[shown.length - 1].step] : [0, -1];
    // Hundreds of borders, a few pixels apart, would be a curtain before the chart.
    const isCrowded = (plot.right - plot.left) / (to - from + 1) < 8;
    for (let step = from; step <= to; step += 1) {
      const [first, end] = stepRange(step);
      const left = x(Math.max(first, view.from)), room = x(Math.min(end, view.to)) - left;
      if (first > view.from && !isCrowded) borders += `M${left.toFixed(1)} ${plot.top - 12}V${plot.bottom}`;
      const name = room > 46 ? `step ${step + 1}` : room > 24 ? String(step + 1) : "";
      if (name) label(name, left + 5, plot.top - 6, "start");
    }
    part("borders").setAttribute("d", borders);
  }

  // ---- selection ------------------------------------------------------------------------------
  let current = null;
  function drawCursor() {
    const seen = current !== null && current >= view.from && current < view.to;
    part("cursor").setAttribute("d", seen ? `M${x(current + 0.5)} ${plot.top}V${plot.bottom}` : "");
    part("dot").setAttribute("r", seen ? 4.5 : 0);
    part("band").setAttribute("width", 0);
    if (!seen) return;
    part("dot").setAttribute("cx", x(current + 0.5));
    part("dot").setAttribute("cy", y(tokens[current].entropy_nats));
    const [first, end] = stepRange(tokens[current].step);
    const left = x(Math.max(first, view.from));
    part("band").setAttribute("x", left);
    part("band").setAttribute("y", plot.top - 12);
    part("band").setAttribute("width", x(Math.min(end, view.to)) - left);
    part("band").setAttribute("height", plot.bottom - plot.top + 12);
  }
  const firsts = [];
  tokens.forEach((token) => { firsts[token.step] ??= token.position; });
  const stepRange = (step) => [firsts[step], firsts[step + 1] ?? tokens.length];

  function select(position) {
    if (position === current) return;
    if (current !== null) spans[current].classList.remove("current");
    spans[current ?? 0].tabIndex = -1;
    current = position;
    byId("inspector").classList.toggle("idle", current === null);
    spans[current ?? 0].tabIndex = 0;
    if (current === null) drawHint();
    else {
      spans[current].classList.add("current");
      drawDetails(tokens[current]);
      if (current < view.from || current >= view.to) return showRange(view.to - view.from);
    }
    drawCursor();
  }
  function goTo(position) {
    spans[position].focus({ preventScroll: true });
    select(position);
    spans[position].scrollIntoView({ block: "nearest" });
    remember();
  }
  const remember = () => history.replaceState(null, "", `#t=${current}`);
  function showRange(count) {
    const width = Math.min(count, tokens.length);
    const from = Math.round((current ?? 0) - width / 2);
    view.from = Math.min(Math.max(from, 0), tokens.length - width);
    view.to = view.from + width;
    for (const button of byId("zoom").children)
      button.setAttribute("aria-pressed", Number(button.dataset.count) === width);
    drawChart();
  }
  function fillZoom() {
    const counts = [tokens.length, 1000, 200].filter((n, k) => k === 0 || n < tokens.length);
    if (counts.length < 2) return;
    counts.forEach((count, k) => {
      const button = el("button", "", k ? `${count} tokens` : "all");
      button.dataset.count = count;
      button.setAttribute("aria-pressed", k === 0);
      button.addEventListener("click", () => showRange(count));
      byId("zoom").append(button);
    });
  }

  // ---- the numbers of one token ---------------------------------------------------------------
  function reason(token) {
    const h = token.entropy_nats, tau = token.threshold_nats;
    const [step, mean] = pair(token.step_entropy_nats, token.mean_entropy_nats);
    const isConfident = token.step_entropy_nats <= token.mean_entropy_nats;
    const level = isConfident ? `Confident step: H_step ${step} ≤ H_bar ${mean}`
      : `Uncertain step: H_step ${step} > H_bar ${mean}`;
    const why = {
      reset: `${level}, so tau_t = ${isConfident ? "tau_0" : "H_step"}.`,
      uniform: isConfident ? `${level}, so every token gets T_low.` : `${level}, so tau_t = H_step.`,
      threshold: "The threshold is tau_0 for every token.",
      sliding: `The threshold is the mean of the last ${policy.window} entropies.`,
      relative: "The threshold is H_step for every token.",
      fixed: "One temperature for every token.",
    }[policy.policy] || "";
    const kind = kindOf(token.position);
    const result = kind === "fixed" ? "T_t" : kind === "high" ? "T_high" : "T_low";
    const end = `${result} = ${degree(token.temperature)}`;
    if (tau === null) return [end, why];
    const [a, b] = pair(h, tau);
    return [`H_t ${a} ${h < tau ? "<" : "≥"} tau_t ${b}: ${end}`, why];
  }
  function meter(share, color) {
    const bar = el("i");
    bar.style.width = `${100 * Math.min(Math.max(share, 0), 1)}%`;
    const box = el("div", "meter", bar);
    box.style.color = color;
    box.setAttribute("aria-hidden", "true");
    return box;
  }
  const quoted = (text) => JSON.stringify(text);
  function drawDetails(token) {
    const kind = kindOf(token.position);
    const [verdict, why] = reason(token);
    const title = el("p", "chosen", el("code", "", quoted(token.text)));
    const where = el("p", "where", `position ${token.position} · ` +
      `id ${token.token_id} · step ${token.step + 1} of ${summary.steps}` +
      (token.ends_step ? " (ends it)" : ""));
    const numbers = el("dl", "numbers");
    for (const [name, field, color] of [
      ["H_t", "entropy_nats", kind === "high" ? "var(--high)" : "var(--low)"],
      ["tau_t", "threshold_nats", "var(--tau)"], ["H_step", "step_entropy_nats", "var(--step)"],
      ["H_bar", "mean_entropy_nats", "var(--mean)"], ["T_t", "temperature", null]]) {
      const value = el("dd", "", color ? num(token[field]) : degree(token[field]));
      value.dataset.field = field;
      const bar = color && token[field] !== null ? meter(token[field] / yMax, color) : el("span");
      numbers.append(el("div", "", el("dt", "", rich(name)), value, bar));
    }
    const rows = token.alternatives.map(([text, probability]) =>
      [text, probability, text === token.text && Math.abs(probability - token.probability) < 1e-6]);
    if (rows.length && token.probability !== null && !rows.some((row) => row[2]))
      rows.push([token.text, token.probability, true]);
    const chance = el("p", "where", token.probability === null ? "Probability not recorded"
      : `Probability under the raw logits: ${percent(token.probability)}` +
        (rows.length ? ", in bold among the likeliest" : ""));
    const others = el("ul", "others");
    rows.forEach(([text, probability, taken]) => {
      const word = el("code", taken ? "taken" : "", quoted(text));
      others.append(el("li", "", word, el("span", "", percent(probability)),
        meter(probability, taken ? "var(--ink)" : "var(--soft)")));
    });
    byId("details").replaceChildren(el("h2", "", "Selected token"), title, where,
      el("p", `verdict ${kind}`, el("b", "", rich(verdict)), rich(why)), numbers, chance, others);
    byId("inspector").dataset.position = token.position;
    if (token.text === "") title.append(" (no text)");
    if (token.text.includes("\ufffd")) title.append(" (part of a character)");
  }
  const drawHint = () => byId("details").replaceChildren(el("h2", "", "Selected token"),
    el("p", "hint", "Point at a token or at the chart to see its numbers."));

  // ---- events: a handful of listeners for the whole page --------------------------------------
  function listen() {
    const positionOf = (event) => Number(event.target.closest(".t")?.dataset.position ?? NaN);
    const steps = byId("steps");
    steps.addEventListener("pointerover", (event) => {
      const position = positionOf(event);
      if (event.pointerType === "mouse" && position >= 0) select(position);
    });
    steps.addEventListener("focusin", (event) => select(positionOf(event)));
    steps.addEventListener("click", (event) => { if (positionOf(event) >= 0) goTo(positionOf(event)); });
    steps.addEventListener("keydown", (event) => {
      const at = current ?? 0, step = tokens[at].step;
      const target = {
        ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: tokens.length - 1,
        ArrowUp: firsts[at > firsts[step] ? step : step - 1], ArrowDown: firsts[step + 1],
      }[event.key];
      if (target === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      goTo(Math.min(Math.max(target, 0), tokens.length - 1));
    });
    const underPointer = (event) => {
      const at = event.clientX - chart.getBoundingClientRect().left - plot.left;
      const position = view.from + Math.floor(at / plot.slot);
      return Math.min(Math.max(position, view.from), view.to - 1);
    };
    chart.addEventListener("pointermove", (event) => select(underPointer(event)));
    chart.addEventListener("click", (event) => goTo(underPointer(event)));
    byId("close").addEventListener("click", () => select(null));
    addEventListener("keydown", (event) => { if (event.key === "Escape") select(null); });
    addEventListener("hashchange", openFragment);
  }
  function openFragment() {
    const position = Number(/^#t=(\d+)$/.exec(location.hash)?.[1] ?? NaN);
    if (!(position < tokens.length)) return;
    select(position);
    spans[position].scrollIntoView({ block: "nearest" });
  }
  // What is under the sticky chart is not in view: scrolling and the inspector keep clear of it.
  function measure() {
    const card = byId("chart-card");
    const isSticky = getComputedStyle(card).position === "sticky";
    document.documentElement.style.setProperty("--under-chart",
      isSticky ? `${card.offsetHeight + 8}px` : "0px");
  }

  fillHeader();
  fillLegends();
  fillText();
  fillZoom();
  drawHint();
  measure();
  drawChart();
  if (tokens.length) {
    listen();
    openFragment();
  }
  new ResizeObserver(() => { measure(); drawChart(); }).observe(chart);
  document.body.dataset.ready = "1";
})();
