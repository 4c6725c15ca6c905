// The AI SDK: /v1/chat/completions, /v1/responses and /v1/messages.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url] = process.argv.slice(2);
const [name, apiKey, baseURL] = ["demo-moe", "a-key-of-the-clients", `${url}/v1`];

async function conversation(model, providerOptions) {
  const calls = [];
  let pieces = 0;
  const add = tool({
    description: "Adds two integers.",
    inputSchema: z.object({ a: z.number().int(), b: z.number().int() }),
    execute: async ({ a, b }) => {
      calls.push({ a, b });
      return `${a + b}`;
    },
  });
  const found = streamText({
    model, providerOptions, tools: { add }, prompt: "What is 19 and 23?", stopWhen: stepCountIs(3), maxRetries: 0,
    maxOutputTokens: 200, onError: ({ error }) => { throw error; },
  });
  let answer = "";
  for await (const part of found.textStream) {
    pieces += 1;
    answer += part;
  }
  return { calls, answer, pieces };
}

const found = [
  await conversation(createOpenAICompatible({ name: "odmoe", baseURL, apiKey }).chatModel(name)),
  await conversation(createOpenAI({ baseURL, apiKey }).responses(name), { openai: { store: false } }),
  await conversation(createAnthropic({ baseURL, apiKey })(name)),
];
const same = found.every((one) => one.answer === found[0].answer);
console.log(JSON.stringify(same ? found[0] : { differ: found }));
