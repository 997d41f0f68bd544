// Requests of the chat: how many messages the context holds, and an answer that streams.

// The events of a stream. Comments, which keep the connection open, are passed over.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    const parts = text.split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
    }
  }
}

const sent = (messages) => [...systemMessages(), ...messages.map((message) => ({ role: message.role, content: contentOf(message) }))];

// Tokens of a prompt, and of the context. More text or pictures than any prompt may have count as endless.
const counted = async (messages, signal) => {
  if (filesOf(messages).length > MOST_SENT) return { tokens: Number.POSITIVE_INFINITY, context: 0 };
  const { reasoning_effort: effort, chat_template_kwargs: given } = thinking();
  const template = given || (effort ? { reasoning_effort: effort } : undefined);
  const body = { messages: sent(messages), ...modelChoice(), ...(template && { chat_template_kwargs: template }) };
  try {
    const found = await (await request("tokenize", body, signal)).json();
    return { tokens: found.count, context: found.max_model_len };
  } catch (error) {
    if (error.code !== "context_length_exceeded" && error.status !== 413) throw error;
    return { tokens: Number.POSITIVE_INFINITY, context: 0 };
  }
};

// Number of the oldest messages that stay out of the prompt. Where an answer has less than a quarter of the context, or
// fewer tokens than its limit, turns leave until half of the context is free; the last question always stays.
const leftOut = async (conversation, signal) => {
  const { messages } = conversation;
  const questions = messages.flatMap((message, i) => (message.role === "user" ? [i] : []));
  const left = questions.includes(conversation.left) ? conversation.left : 0;
  const { tokens, context } = await counted(messages.slice(left), signal);
  const most = sampling().max_tokens || Number.POSITIVE_INFINITY;
  if (tokens + Math.min(most, Math.floor(context / 4)) <= context) return left;
  const later = questions.filter((i) => i > left);
  let low = 0, high = later.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    const half = await counted(messages.slice(later[middle]), signal);
    if (half.tokens <= half.context / 2) high = middle;
    else low = middle + 1;
  }
  return later.length ? later[low] : left;
};

// Streams the answer to a conversation into a message; `changed` is called as it grows.
const answer = async (conversation, message, changed, signal) => {
  const body = {
    messages: sent(conversation.messages.slice(conversation.left).filter((one) => one !== message)),
    stream: true, return_progress: true, ...modelChoice(), ...sampling(), ...thinking(),
  };
  let begun = 0;
  for await (const chunk of events(await request("v1/chat/completions", body, signal))) {
    if (chunk.error) throw new Refused(500, chunk.error);
    const choice = chunk.choices[0], delta = choice?.delta;
    if (delta?.reasoning_content) {
      begun ||= performance.now();
      message.reasoning = (message.reasoning || "") + delta.reasoning_content;
      message.thought = (performance.now() - begun) / 1000;
    }
    if (delta?.content) message.content += delta.content;
    message.progress = chunk.prompt_progress || (delta?.content || delta?.reasoning_content ? undefined : message.progress);
    if (chunk.timings) Object.assign(message, { timings: chunk.timings, counts: chunk.edgemoe, progress: undefined });
    changed();
  }
};
