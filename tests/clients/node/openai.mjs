// The openai package for Node against a running server: `node openai.mjs URL SCRIPTED_URL SEED` prints one JSON line a check.
// What lives here: asking, and what the client made of the answer. What may not: judging it (test_openai_node.py).

import OpenAI from "openai";

const [url, scriptedUrl, seed] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "unused", maxRetries: 0, timeout: 60_000 });
const scripted = new OpenAI({ baseURL: `${scriptedUrl}/v1`, apiKey: "unused", maxRetries: 0, timeout: 60_000 });
const messages = [{ role: "user", content: "What does a mill do?" }];
const asked = { model: "demo", messages, temperature: 0, max_tokens: 12 };
const size = { type: "object", properties: { size: { type: "integer" } }, required: ["size"], additionalProperties: false };
const grind = { type: "function", function: { name: "grind", description: "Grinds.", parameters: size } };
const call = '<tool_call>\n{"name": "grind", "arguments": {"size": 3}}\n</tool_call>';
const says = (text) => ({ model: "demo", seed: Number(seed), max_tokens: 200, messages: [{ role: "user", content: `⟦${text}⟧` }] });

const collect = async (stream) => {
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  return chunks;
};
const failure = async (promise) => {
  try {
    await promise;
  } catch (error) {
    return { name: error.constructor.name, status: error.status, code: error.code, param: error.param, type: error.type, message: error.message };
  }
  return null;
};

const checks = {
  async whole() {
    const answer = await client.chat.completions.create(asked);
    return { text: answer.choices[0].message.content, reason: answer.choices[0].finish_reason, usage: answer.usage, id: answer._request_id };
  },
  async streamed() {
    const chunks = await collect(await client.chat.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } }));
    const text = chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join("");
    const roles = chunks.filter((chunk) => chunk.choices[0]?.delta.role).length;
    return { text, roles, reason: chunks.at(-2).choices[0].finish_reason, usage: chunks.at(-1).usage, last: chunks.at(-1).choices.length };
  },
  async helper() {
    const stream = client.chat.completions.stream(asked);
    const final = await stream.finalChatCompletion();
    return { text: final.choices[0].message.content, reason: final.choices[0].finish_reason };
  },
  async unicode() {
    const text = "a\u2028b\u2029c\u0085d 😀 é \\ \" </script>";
    const chunks = await collect(await scripted.chat.completions.create({ ...says(text), stream: true }));
    return { same: chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join("") === text };
  },
  async forced() {
    const body = { ...asked, max_tokens: 60, tools: [grind], tool_choice: { type: "function", function: { name: "grind" } } };
    const answer = await client.chat.completions.create(body);
    const final = await client.chat.completions.stream(body).finalChatCompletion();
    const [one, two] = [answer, final].map((each) => each.choices[0].message.tool_calls[0].function);
    return { function: one.name, arguments: one.arguments, same: one.arguments === two.arguments && one.name === two.name };
  },
  async own_call() {
    const body = { ...says(`<think>hm</think>Let me see. ${call}`), tools: [grind] };
    const answer = await scripted.chat.completions.create(body);
    const final = await scripted.chat.completions.stream(body).finalChatCompletion();
    const shown = [answer, final].map(({ choices: [choice] }) => [
      choice.finish_reason, choice.message.content, choice.message.tool_calls[0].function.arguments,
    ]);
    const asks = [...body.messages, answer.choices[0].message, { role: "tool", tool_call_id: answer.choices[0].message.tool_calls[0].id, content: "flour" }];
    const next = await scripted.chat.completions.create({ ...says("Done."), messages: [...asks, ...says("Done.").messages], tools: [grind] });
    return { shown, reasoning: answer.choices[0].message.reasoning_content, next: next.choices[0].message.content };
  },
  async structured() {
    const form = { type: "json_schema", json_schema: { name: "mill", schema: size, strict: true } };
    const answer = await client.chat.completions.parse({ ...asked, max_tokens: 60, response_format: form });
    return { content: JSON.parse(answer.choices[0].message.content) };
  },
  async logprobs_and_stop() {
    const scored = await client.chat.completions.create({ ...asked, max_tokens: 3, logprobs: true, top_logprobs: 2 });
    const text = (await client.chat.completions.create({ ...asked, max_tokens: 24 })).choices[0].message.content;
    const stop = text.slice(text.length / 2, text.length / 2 + 4);
    const cut = await client.chat.completions.create({ ...asked, max_tokens: 24, stop });
    return { tops: scored.choices[0].logprobs.content.map((entry) => entry.top_logprobs.length), cut: cut.choices[0].message.content === text.slice(0, text.indexOf(stop)) };
  },
  async completions() {
    const body = { model: "demo", prompt: "Once upon a time", temperature: 0, max_tokens: 8 };
    const whole = await client.completions.create(body);
    const chunks = await collect(await client.completions.create({ ...body, stream: true }));
    return { same: chunks.map((chunk) => chunk.choices[0]?.text ?? "").join("") === whole.choices[0].text, text: whole.choices[0].text };
  },
  async responses() {
    const body = { model: "demo", input: messages[0].content, temperature: 0, max_output_tokens: 12 };
    const whole = await client.responses.create(body);
    const events = await collect(await client.responses.create({ ...body, stream: true }));
    const final = await client.responses.stream(body).finalResponse();
    return { text: whole.output_text, streamed: events.at(-1).response.output[0].content[0].text, helper: final.output_text, last: events.at(-1).type };
  },
  async models() {
    const names = [];
    for await (const model of client.models.list()) names.push(model.id);
    return { names };
  },
  async errors() {
    const long = { ...asked, messages: [{ role: "user", content: "mill ".repeat(5000) }] };
    return {
      param: await failure(client.chat.completions.create({ ...asked, temperature: 1000 })),
      long: await failure(client.chat.completions.create(long)),
      long_stream: await failure(client.chat.completions.create({ ...long, stream: true })),
      model: await failure(client.chat.completions.create({ ...asked, model: "gpt-4" })),
      embeddings: await failure(client.embeddings.create({ model: "demo", input: "x" })),
    };
  },
  async cancelled() {
    const stream = await client.chat.completions.create({ ...asked, max_tokens: 1000, stream: true, ignore_eos: true });
    for await (const _ of stream) break;
    const controller = new AbortController();
    const aborted = failure(client.chat.completions.create({ ...asked, max_tokens: 1000, ignore_eos: true }, { signal: controller.signal }));
    setTimeout(() => controller.abort(), 100);
    return { aborted: (await aborted).name };
  },
};

for (const [name, check] of Object.entries(checks)) {
  let shown;
  try {
    shown = await check();
  } catch (error) {
    shown = { failed: String(error.stack ?? error) };
  }
  console.log(JSON.stringify({ name, ...shown }));
}
