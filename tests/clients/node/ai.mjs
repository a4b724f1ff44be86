// The AI SDK against a running server: `node ai.mjs URL QUESTIONS` prints one JSON line a check.
// What lives here: asking, and what the client made of the answer. What may not: judging it (test_ai_sdk.py).

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, given] = process.argv.slice(2);
const asked = JSON.parse(given);
const baseURL = `${url}/v1`;
const models = {
  compatible: createOpenAICompatible({ name: "headrace", baseURL, apiKey: "none", supportsStructuredOutputs: true, includeUsage: true })("demo"),
  responses: createOpenAI({ baseURL, apiKey: "none" }).responses("demo"),
  messages: createAnthropic({ baseURL, apiKey: "none" })("demo"),
};
const weather = tool({
  description: "Get the current weather for a city",
  inputSchema: z.object({ city: z.string().describe("City name") }),
  execute: async ({ city }) => asked.reports[city],
});
const person = z.object({ name: z.string(), age: z.number().int() });

for (const [name, model] of Object.entries(models)) {
  const common = { model, temperature: 0, maxRetries: 0, maxOutputTokens: 200 };
  const agent = { ...common, prompt: asked.weather, tools: { get_weather: weather }, stopWhen: stepCountIs(4) };
  const seen = (steps) => steps.flatMap((step) => step.toolCalls.map((call) => [call.toolName, call.input]));
  const checks = {
    async chat() {
      const whole = await generateText({ ...common, prompt: asked.capital });
      const stream = streamText({ ...common, prompt: asked.capital });
      const pieces = [];
      for await (const piece of stream.textStream) pieces.push(piece);
      const usages = [whole.usage, await stream.usage].map((usage) => [usage.inputTokens, usage.outputTokens]);
      return { whole: whole.text, streamed: pieces.join(""), pieces: pieces.length, usages, reasons: [whole.finishReason, await stream.finishReason] };
    },
    async agent() {
      const whole = await generateText(agent);
      const stream = streamText(agent);
      return { texts: [whole.text, await stream.text], calls: [seen(whole.steps), seen(await stream.steps)] };
    },
    async forced() {
      const { steps } = await generateText({ ...agent, toolChoice: "required", stopWhen: stepCountIs(1) });
      return { calls: seen(steps) };
    },
    async object() {
      const form = { ...common, prompt: asked.extract, output: Output.object({ schema: person }) };
      const whole = await generateText(form);
      const stream = streamText(form);
      const partial = [];
      for await (const each of stream.partialOutputStream) partial.push(each);
      return { objects: [whole.output, await stream.output], partial: partial.length };
    },
  };
  for (const [check, run] of Object.entries(checks)) {
    let shown;
    try {
      shown = await run();
    } catch (error) {
      shown = { failed: String(error.stack ?? error), body: error.responseBody };
    }
    console.log(JSON.stringify({ api: name, check, ...shown }));
  }
}
