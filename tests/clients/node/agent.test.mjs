// An agent of Vercel's AI SDK: QARR_URL names the router, FOLDER the repository, and TASK what is to be done there.
import assert from "node:assert/strict";
import { execSync } from "node:child_process";
import { readFileSync, writeFileSync } from "node:fs";
import test from "node:test";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { jsonSchema, stepCountIs, streamText, tool } from "ai";

const provider = createOpenAICompatible({ name: "qarr", baseURL: `${process.env.QARR_URL}/v1` });
const run = (names, execute) => tool({
  inputSchema: jsonSchema({
    type: "object", properties: Object.fromEntries(names.map((name) => [name, {}])), required: names,
  }),
  execute,
});
const tools = {
  read_file: run(["file_path"], ({ file_path }) => readFileSync(file_path, "utf8")),
  edit: run(["file_path", "old_string", "new_string"], ({ file_path, old_string, new_string }) => {
    writeFileSync(file_path, readFileSync(file_path, "utf8").replace(old_string, new_string));
    return "done";
  }),
  run_shell_command: run(["command", "is_background"], ({ command }) =>
    execSync(command, { cwd: process.env.FOLDER, encoding: "utf8" })),
};

test("an agent thinks, calls three tools, and says that it is done", async () => {
  const result = streamText({
    model: provider("auto"), prompt: process.env.TASK, tools, stopWhen: stepCountIs(6), maxRetries: 0,
    onError: ({ error }) => { throw error; },
  });
  const steps = await result.steps;
  assert.equal(steps.length, 4);
  for (const step of steps) assert.ok(step.reasoningText, JSON.stringify(step));
  assert.match(await result.text, /the test passes/);
});
