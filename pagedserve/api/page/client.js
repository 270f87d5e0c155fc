// The server's API as the page uses it.

// Streams the answer to messages: calls `onText` with each piece; gives { usage, seconds, firstSeconds } at the end.
export async function chat(messages, settings, signal, onText) {
  const body = { messages, stream: true, stream_options: { include_usage: true } };
  for (const [name, value] of Object.entries(settings)) {
    if (name !== "system" && value !== "") body[name] = Number(value);
  }
  const started = performance.now();
  const response = await fetch("/v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) throw new Error(await explanation(response));
  const result = { usage: null, finish: null, firstSeconds: null, seconds: 0 };
  for await (const data of events(response.body)) {
    if (data === "[DONE]") break;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    result.usage = chunk.usage ?? result.usage;
    const choice = chunk.choices[0];
    if (!choice) continue;
    result.finish = choice.finish_reason ?? result.finish;
    if (choice.delta.content !== undefined && choice.delta.role === undefined) {
      result.seconds = (performance.now() - started) / 1000;
      result.firstSeconds ??= result.seconds;
      onText(choice.delta.content);
    }
  }
  return result;
}

async function explanation(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (text + value).split("\n\n");
    text = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
  }
}

export async function models() {
  const response = await fetch("/v1/models");
  if (!response.ok) throw new Error(await explanation(response));
  return (await response.json()).data;
}

export async function status(since) {
  const response = await fetch(`/status?blocks=true&since=${since}`);
  if (!response.ok) throw new Error(await explanation(response));
  return response.json();
}
