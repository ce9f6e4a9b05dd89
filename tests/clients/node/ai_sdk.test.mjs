// Vercel's AI SDK against a running router, with the tools that applications declare: QARR_URL names it. LOGIT_BIAS keeps the
// model from writing white space between the parts of JSON.
import assert from "node:assert/strict";
import test from "node:test";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, streamText, tool } from "ai";

const logit_bias = JSON.parse(process.env.LOGIT_BIAS);
const provider = createOpenAICompatible({
  name: "qarr",
  baseURL: `${process.env.QARR_URL}/v1`,
  fetch: (url, init) => fetch(url, { ...init, body: JSON.stringify({ ...JSON.parse(init.body), logit_bias }) }),
});
const city = { type: "string", enum: ["Paris", "Rome"] };
const weather = tool({
  description: "The weather of a city",
  inputSchema: jsonSchema({ type: "object", properties: { city }, required: ["city"], additionalProperties: false }),
});
const asked = {
  model: provider("precise"), prompt: "Weather in Paris?", tools: { weather }, toolChoice: "required", temperature: 0,
  maxOutputTokens: 60, maxRetries: 0,
};

test("a required tool is called with an object", async () => {
  const { toolCalls } = await generateText(asked);
  assert.ok(toolCalls.length > 0);
  for (const call of toolCalls) {
    assert.ok(!call.invalid, JSON.stringify(call));
    assert.ok(city.enum.includes(call.input.city), JSON.stringify(call));
  }
});

test("streamed, it is the same", async () => {
  const calls = await streamText({ ...asked, onError: ({ error }) => { throw error; } }).toolCalls;
  assert.ok(calls.length > 0);
  for (const call of calls) assert.ok(!call.invalid && city.enum.includes(call.input.city), JSON.stringify(call));
});
