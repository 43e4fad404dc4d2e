// What check_node.py looks at: one line of JSON for each part.
import { readFileSync } from "node:fs";
import OpenAI from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const tell = (part, said) => console.log(JSON.stringify({ part, ...said }));
const request = { model, messages: [{ role: "user", content: "Name three rivers." }], max_tokens: 20, temperature: 0 };

const { version } = JSON.parse(readFileSync("node_modules/openai/package.json", "utf8"));
tell("version", { version, node: process.versions.node });

const chat = await client.chat.completions.create(request);
const [{ message, finish_reason }] = chat.choices;
tell("chat", { content: message.content, finish_reason, usage: chat.usage, request_id: chat._request_id });

let content = "";
let usage = null;
const options = { ...request, stream: true, stream_options: { include_usage: true } };
for await (const chunk of await client.chat.completions.create(options)) {
  content += chunk.choices[0]?.delta.content ?? "";
  usage = chunk.usage ?? usage;
}
tell("stream", { content, usage });

tell("helper", { content: await client.chat.completions.stream(request).finalContent() });

try {
  await client.chat.completions.create({ ...request, model: "gpt" });
} catch (error) {
  tell("error", { class: error.constructor.name, status: error.status, code: error.code, request_id: error.requestID });
}

let chunks = 0;
for await (const _ of await client.chat.completions.create({ ...request, max_tokens: 2000, ignore_eos: true, stream: true })) {
  chunks += 1;
  if (chunks === 2) break;
}
tell("left", { chunks });
