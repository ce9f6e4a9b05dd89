// OpenAI's JavaScript SDK against a running router. QARR_URL names it; QARR_LIMITED_KEY is not set, keys are off. LOGIT_BIAS
// keeps the model from writing white space between the parts of JSON.
import assert from "node:assert/strict";
import test from "node:test";
import OpenAI, { NotFoundError, BadRequestError } from "openai";

const client = new OpenAI({ baseURL: `${process.env.QARR_URL}/v1`, apiKey: "unused", maxRetries: 0, timeout: 120_000 });
const question = [{ role: "user", content: "What is the capital of France?" }];
const brief = { messages: question, max_tokens: 16, temperature: 0 };

test("a chat is answered, and the headers say by whom", async () => {
  const { data, response } = await client.chat.completions
    .create({ model: "auto", ...brief, logprobs: true, top_logprobs: 1 })
    .withResponse();
  const [choice] = data.choices;
  const tokens = choice.logprobs.content;
  assert.ok(choice.message.content.length > 0);
  assert.ok(tokens.map(({ token }) => token).join("").startsWith(choice.message.content));
  for (const { logprob, top_logprobs: [first] } of tokens) assert.equal(logprob, first.logprob); // the likeliest each time
  assert.ok(["fast", "balanced", "precise"].includes(response.headers.get("x-qarr-tier")));
});

test("a stream is the same answer in pieces, and its usage comes when asked for", async () => {
  const whole = await client.chat.completions.create({ model: "fast", ...brief });
  const stream = await client.chat.completions.create({
    model: "fast", ...brief, stream: true, stream_options: { include_usage: true },
  });
  let text = "";
  let usage = null;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta?.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.equal(text, whole.choices[0].message.content);
  assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
});

test("a stream can be left early", async () => {
  const stream = await client.chat.completions.create({ model: "fast", ...brief, max_tokens: 400, stream: true });
  for await (const _ of stream) break;
  const next = await client.chat.completions.create({ model: "fast", ...brief, max_tokens: 2, min_tokens: 2 });
  assert.equal(next.usage.completion_tokens, 2);
});

test("an answer keeps to a JSON schema", async () => {
  const schema = { type: "object", properties: { city: { type: "string", maxLength: 12 } }, required: ["city"] };
  const answer = await client.chat.completions.create({
    model: "fast", ...brief, max_tokens: 60, logit_bias: JSON.parse(process.env.LOGIT_BIAS),
    response_format: { type: "json_schema", json_schema: { name: "place", schema } },
  });
  assert.equal(typeof JSON.parse(answer.choices[0].message.content).city, "string");
});

test("routing can be asked for in headers", async () => {
  const { response } = await client.chat.completions
    .create({ model: "auto", ...brief, max_tokens: 2 }, { headers: { "x-qarr-tier": "precise" } })
    .withResponse();
  assert.equal(response.headers.get("x-qarr-tier"), "precise");
});

test("errors are the SDK's own classes", async () => {
  await assert.rejects(client.chat.completions.create({ model: "nope", messages: question }), (error) => {
    assert.ok(error instanceof NotFoundError);
    assert.equal(error.code, "model_not_found");
    return true;
  });
  await assert.rejects(client.chat.completions.create({ model: "auto", messages: [] }), BadRequestError);
});

test("models are listed", async () => {
  const names = [];
  for await (const model of client.models.list()) names.push(model.id);
  assert.ok(names.includes("auto") && names.includes("precise"));
});
