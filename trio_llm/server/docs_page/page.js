// Renders /openapi.json.  Everything is made with createElement and textContent: nothing from the document
// or from an answer is ever read as HTML.

const byId = (id) => document.getElementById(id);

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children.flat());
  return element;
}

/** Text in which `code` is marked with backticks, in paragraphs. */
function prose(text) {
  return text.split(/\n\s*\n/).map((paragraph) =>
    make("p", {}, ...paragraph.split(/`([^`]+)`/).map((part, index) => (index % 2 ? make("code", {}, part) : part))));
}

const nameOf = (ref) => ref.split("/").at(-1);

/** A schema in a few words; objects are links to where they are described. */
function words(schema) {
  if (schema.$ref) return [make("a", { href: `#object-${nameOf(schema.$ref)}` }, nameOf(schema.$ref))];
  if (schema.anyOf) return schema.anyOf.flatMap((part, index) => (index ? [" or ", ...words(part)] : words(part)));
  if (schema.enum) return [schema.enum.map((value) => JSON.stringify(value)).join(", ")];
  const kinds = [schema.type ?? "any"].flat();
  if (kinds.includes("array")) {
    const rest = kinds.filter((kind) => kind !== "array").map((kind) => ` or ${kind}`);
    return ["array of ", ...words(schema.items ?? {}), ...(schema.maxItems ? [` (at most ${schema.maxItems})`] : []), ...rest];
  }
  const limits = [];
  if (schema.minimum !== undefined) limits.push(`at least ${schema.minimum}`);
  if (schema.exclusiveMinimum !== undefined) limits.push(`above ${schema.exclusiveMinimum}`);
  if (schema.maximum !== undefined) limits.push(`at most ${schema.maximum}`);
  return [kinds.join(" or ") + (limits.length ? ` (${limits.join(", ")})` : "")];
}

function fieldRow(name, schema, required) {
  const mark = required ? [" ", make("span", { class: "required" }, "required")] : [];
  const fallback = schema.default === undefined ? [] : [make("span", { class: "faint" }, ` default ${JSON.stringify(schema.default)}`)];
  return make("tr", {},
    make("td", {}, make("code", {}, name), ...mark),
    make("td", {}, ...words(schema), ...fallback),
    make("td", {}, ...prose(schema.description ?? "")));
}

function fieldTable(schema, names) {
  const required = new Set(schema.required ?? []);
  return make("table", {},
    make("thead", {}, make("tr", {}, ["Field", "Values", "What it does"].map((title) => make("th", { scope: "col" }, title)))),
    make("tbody", {}, names.map((name) => fieldRow(name, schema.properties[name], required.has(name)))));
}

/** An object's fields: those that do something at once, the others folded away. */
function fields(schema) {
  const required = new Set(schema.required ?? []);
  const names = Object.keys(schema.properties ?? {}).sort((a, b) => required.has(b) - required.has(a));
  const treated = (treatment) => names.filter((name) => (schema.properties[name]["x-support"] ?? "supported") === treatment);
  const parts = [...prose(schema.description ?? ""), fieldTable(schema, treated("supported"))];
  for (const [treatment, title] of [["accepted", "Accepted and not used"], ["refused", "Not supported: only values that ask for nothing pass"]]) {
    const found = treated(treatment);
    if (found.length) parts.push(make("details", {}, make("summary", {}, `${title} (${found.length})`), fieldTable(schema, found)));
  }
  return parts;
}

/** What the events of a stream say in words, if they say anything. */
function textOf(data) {
  // typed events: those of Responses, and those of Messages
  if (data.type?.endsWith("_text.delta")) return data.delta;
  if (data.type === "content_block_delta") return data.delta.text ?? data.delta.thinking ?? "";
  const choice = data.choices?.find((choice) => choice.index === 0);
  return choice?.delta?.reasoning_content ?? choice?.delta?.content ?? choice?.text ?? "";
}

/** The complete events of a buffer, and what is left of it. */
function events(buffer) {
  const blocks = buffer.split("\n\n");
  const rest = blocks.pop();
  const data = blocks.flatMap((block) => block.split("\n")).filter((line) => line.startsWith("data:"));
  return [data.map((line) => line.slice(5).trim()), rest];
}

async function showAnswer(response, view) {
  const isStream = (response.headers.get("content-type") ?? "").startsWith("text/event-stream");
  view.text.hidden = !isStream;
  if (!isStream) {
    const body = await response.text();
    try { view.raw.textContent = JSON.stringify(JSON.parse(body), null, 2); } catch { view.raw.textContent = body; }
    return;
  }
  const decoder = new TextDecoder();
  const reader = response.body.getReader();
  let buffer = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const piece = decoder.decode(value, { stream: true });
    view.raw.append(piece);
    const [data, rest] = events(buffer + piece);
    buffer = rest;
    for (const item of data) if (item !== "[DONE]") view.text.append(textOf(JSON.parse(item)));
  }
}

function tryForm(path, method, operation) {
  const parameters = (operation.parameters ?? []).map((parameter) => {
    const input = make("input", { name: parameter.name, ...(parameter.required ? { required: "" } : {}) });
    return { name: parameter.name, isQuery: parameter.in === "query", input, label: make("label", {}, parameter.name, input) };
  });
  const content = operation.requestBody?.content["application/json"];
  const body = content && make("textarea", { spellcheck: "false" });
  if (body) body.value = JSON.stringify(content.example ?? {}, null, 2);
  const send = make("button", { type: "submit" }, "Send");
  const stop = make("button", { type: "button", disabled: "" }, "Stop");
  const view = {
    status: make("p", { class: "status", role: "status" }),
    text: make("pre", { class: "text", "aria-live": "polite", "aria-label": "Text of the answer" }),
    raw: make("pre", { class: "raw", tabindex: "0", "aria-label": "The answer as it came" }),
  };
  view.text.hidden = view.raw.hidden = true;
  const form = make("form", {}, ...parameters.map((parameter) => parameter.label),
    ...(body ? [make("label", {}, "Body", body)] : []), send, stop, view.status, view.text, view.raw);
  let abort = null;
  stop.addEventListener("click", () => abort?.abort());
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    let url = path;
    const query = new URLSearchParams();
    for (const { name, isQuery, input } of parameters) {
      if (!isQuery) url = url.replace(`{${name}}`, encodeURIComponent(input.value));
      else if (input.value) query.set(name, input.value);
    }
    if (query.size) url += `?${query}`;
    const headers = body ? { "content-type": "application/json" } : {};
    abort = new AbortController();
    view.text.textContent = view.raw.textContent = view.status.textContent = "";
    view.raw.hidden = false;
    send.disabled = true;
    stop.disabled = false;
    const started = performance.now();
    try {
      const response = await fetch(url, { method: method.toUpperCase(), headers, body: body?.value, signal: abort.signal });
      view.status.className = `status ${response.ok ? "good" : "bad"}`;
      view.status.textContent = `${response.status}`;
      await showAnswer(response, view);
      const id = response.headers.get("x-request-id");
      view.status.append(` in ${Math.round(performance.now() - started)} ms${id ? `, request ${id}` : ""}`);
    } catch (error) {
      view.status.className = "status bad";
      view.status.append(error.name === "AbortError" ? " stopped" : ` ${error.message}`);
    } finally {
      send.disabled = false;
      stop.disabled = true;
    }
  });
  return make("details", {}, make("summary", {}, "Try it"), form);
}

/** What an answer holds: of a stream, what its events do. */
function heldBy(schema) {
  const data = schema.properties?.data;
  // a stream that ends with [DONE] has two kinds of events
  return (data?.anyOf ?? [data]).find((part) => part?.contentSchema)?.contentSchema ?? schema;
}

function answers(operation) {
  const rows = Object.entries(operation.responses).filter(([, response]) => response.content).flatMap(([status, response]) =>
    Object.entries(response.content).map(([type, { schema }]) => make("tr", {},
      make("td", {}, status), make("td", {}, make("code", {}, type)), make("td", {}, ...words(heldBy(schema))))));
  return make("table", {},
    make("thead", {}, make("tr", {}, ["Status", "Type", "Holds"].map((title) => make("th", { scope: "col" }, title)))),
    make("tbody", {}, rows));
}

function operationView(path, method, operation, schemas) {
  const request = operation.requestBody?.content["application/json"].schema.$ref;
  return make("details", { id: operation.operationId, class: "operation" },
    make("summary", {}, make("span", { class: "method" }, method.toUpperCase()), " ", make("code", {}, path), " ",
      make("span", { class: "summary" }, operation.summary ?? "")),
    ...prose(operation.description ?? ""),
    tryForm(path, method, operation),
    ...(request ? [make("h3", {}, "Request"), ...fields(schemas[nameOf(request)])] : []),
    make("h3", {}, "Answer"), answers(operation));
}

/** A table as Markdown writes it. */
function markdownTable(lines) {
  const cells = (line) => line.split("|").slice(1, -1).map((cell) => cell.trim().replaceAll("`", ""));
  const [head, , ...rows] = lines.map(cells);
  return make("table", {},
    make("thead", {}, make("tr", {}, head.map((cell) => make("th", { scope: "col" }, cell)))),
    make("tbody", {}, rows.map((row) => make("tr", {}, row.map((cell) => make("td", {}, cell))))));
}

function showTarget() {
  const target = location.hash && byId(decodeURIComponent(location.hash.slice(1)));
  if (target instanceof HTMLDetailsElement) {
    target.open = true;
    target.scrollIntoView();
  }
}

function render(api) {
  const schemas = api.components.schemas;
  byId("about").textContent = `${api.info.description} Version ${api.info.version}, OpenAPI ${api.openapi}.`;
  for (const [path, methods] of Object.entries(api.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      byId("operations").append(operationView(path, method, operation, schemas));
      byId("contents").append(make("li", {}, make("a", { href: `#${operation.operationId}` }, `${method.toUpperCase()} ${path}`)));
    }
  }
  const [about, table] = api.components.responses.ErrorBody.description.split("\n\n");
  byId("errors").append(...prose(about), markdownTable(table.split("\n")));
  for (const [name, schema] of Object.entries(schemas)) {
    byId("objects").append(make("details", { id: `object-${name}` }, make("summary", {}, make("code", {}, name)), ...fields(schema)));
  }
  byId("errors").hidden = byId("objects").hidden = false;
  addEventListener("hashchange", showTarget);
  showTarget();
}

try {
  const response = await fetch("/openapi.json");
  if (!response.ok) throw new Error(`/openapi.json answered ${response.status}`);
  render(await response.json());
} catch (error) {
  byId("about").textContent = `The document cannot be shown: ${error.message}`;
}
