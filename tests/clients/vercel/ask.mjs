// The Vercel AI SDK against the frontend at the URL that is the first argument. Prints one JSON object: by provider, what
// each operation came to. The caller judges; a failure here is a value, too.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

globalThis.AI_SDK_LOG_WARNINGS = false;
const base = `${process.argv[2]}/v1`;
const picture = process.argv[3];
const says = (text, more = {}) => `<<<${JSON.stringify({ text, ...more })}>>>`;
const calls = (...cities) =>
  cities
    .map((city) => `<tool_call>\n${JSON.stringify({ name: "get_weather", arguments: { city } })}\n</tool_call>`)
    .join("\n");

const openai = createOpenAI({ baseURL: base, apiKey: "none" });
const compatible = createOpenAICompatible({
  name: "frontend", baseURL: base, apiKey: "none", includeUsage: true, supportsStructuredOutputs: true,
});
const anthropic = createAnthropic({ baseURL: base, apiKey: "none" });
// Responses are not stored here, which this SDK takes for granted unless it is told.
const stateless = { openai: { store: false } };
const providers = {
  chat: (name) => openai.chat(name),
  responses: (name) => openai.responses(name),
  compatible: (name) => compatible(name),
  messages: (name) => anthropic(name === "m" ? "claude-m" : name),
};

const asked = [];
const schema = z.object({ city: z.string() });
const getWeather = tool({
  description: "Weather of a city",
  inputSchema: schema,
  execute: async ({ city }) => {
    asked.push(city);
    return says(`Sunny in ${city}`);
  },
});

async function streamed(options) {
  const result = streamText({ ...options, onError() {} });
  const kinds = new Set();
  let fragments = 0;
  let text = "";
  let error = null;
  for await (const part of result.fullStream) {
    kinds.add(part.type);
    if (part.type === "text-delta") text += part.text;
    if (part.type === "tool-input-delta") fragments += 1;
    if (part.type === "error") error = part.error;
  }
  return { result, kinds, text, fragments, error };
}

const operations = {
  async whole(options) {
    const { text, usage, finishReason } = await generateText({ ...options, prompt: says("<think>hm</think>Héllo") });
    return { text, finishReason, tokens: usage.totalTokens };
  },
  async stream(options) {
    const { result, text } = await streamed({ ...options, prompt: says("<think>hm</think>Héllo") });
    return { text, finishReason: await result.finishReason, tokens: (await result.usage).totalTokens };
  },
  async tools(options) {
    asked.length = 0;
    const prompt = says(`<think>hm</think>I look. ${calls("Paris", "Rome")}`, { chunk: 3 });
    const { result, text, fragments, error } = await streamed({
      ...options, tools: { get_weather: getWeather }, stopWhen: stepCountIs(3), prompt,
    });
    if (error) throw error;
    return { text, fragments, asked: [...asked].sort(), steps: (await result.steps).length };
  },
  async toolsWhole(options) {
    const { text, steps } = await generateText({
      ...options, tools: { get_weather: getWeather }, stopWhen: stepCountIs(3), prompt: says(calls("Paris", "Rome")),
    });
    return { text, steps: steps.length, inputs: steps[0].toolCalls.map((call) => call.input.city) };
  },
  async required(options) {
    const { toolCalls } = await generateText({
      ...options, tools: { get_weather: tool({ inputSchema: schema }) }, toolChoice: "required",
      prompt: says('[{"name": "get_weather", "parameters": {"city": "Oslo"}}]'),
    });
    return toolCalls.map((call) => call.input.city);
  },
  async structured(options) {
    const output = Output.object({ schema: z.object({ final: z.number() }) });
    const { output: found } = await generateText({ ...options, output, prompt: says('{"final": 3}') });
    const { result } = await streamed({ ...options, output, prompt: says('{"final": 3}', { chunk: 2 }) });
    return [found, await result.output];
  },
  async picture(options) {
    const content = [{ type: "text", text: says("A cat") }, { type: "image", image: picture }];
    return (await generateText({ ...options, messages: [{ role: "user", content }] })).text;
  },
  async broken(options) {
    const { text, error } = await streamed({ ...options, prompt: says("", { raise: "http", code: 500, after: "Hel" }) });
    return { text, message: error?.message ?? null };
  },
  async again(options, provider) {
    const prompt = says("Hello", { fails: 1, code: 503, by: provider });
    return (await generateText({ ...options, maxRetries: 2, prompt })).text;
  },
  async abort(options) {
    const controller = new AbortController();
    const { kinds } = await streamedUntil(options, controller);
    return [...kinds].includes("abort");
  },
};

async function streamedUntil(options, controller) {
  const prompt = says("x".repeat(2000), { delay: 0.05 });
  const result = streamText({ ...options, prompt, abortSignal: controller.signal, onError() {} });
  const kinds = new Set();
  for await (const part of result.fullStream) {
    kinds.add(part.type);
    if (part.type === "text-delta") controller.abort();
  }
  return { kinds };
}

const failed = (error) => ({ failed: error.message, status: error.statusCode ?? null });
const report = {};
for (const [provider, model] of Object.entries(providers)) {
  const options = { model: model("m"), maxRetries: 0, maxOutputTokens: 2000, providerOptions: stateless };
  report[provider] = {};
  for (const [name, operation] of Object.entries(operations)) {
    report[provider][name] = await operation(options, provider).catch(failed);
    console.error(provider, name, Math.round(performance.now()));
  }
  report[provider].unknown = await generateText({ ...options, model: model("zz"), prompt: "x" }).catch(failed);
}
const { embeddings } = await embedMany({ model: openai.embedding("e"), values: ["a", "b"] });
report.embeddings = embeddings.map((embedding) => embedding.length);
report.completion = (await generateText({ model: openai.completion("m"), prompt: says("Hello") })).text;
console.log(JSON.stringify(report));
