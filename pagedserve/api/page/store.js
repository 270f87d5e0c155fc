// Conversations in localStorage. Each is a tree of messages: an edit or a new answer is a sibling, nothing is lost.

const KEY = "pagedserve.conversations";
// As in `pagedserve chat`: what suits small instruction models; max_tokens ends one that repeats itself.
const SYSTEM = "You are a helpful assistant. Answer briefly and to the point.";
const DEFAULTS = { system: SYSTEM, temperature: "0.2", top_p: "0.9", top_k: "", min_p: "", repetition_penalty: "", max_tokens: "1024", seed: "" };

let state = load();

function load() {
  try {
    const stored = JSON.parse(localStorage.getItem(KEY));
    if (stored && Array.isArray(stored.conversations)) return stored;
  } catch { /* unreadable: begin anew */ }
  return { current: null, conversations: [] };
}

export function save() {
  for (;;) {
    try {
      localStorage.setItem(KEY, JSON.stringify(state));
      return;
    } catch {
      // The browser's room is full: the oldest conversation that is not shown goes.
      const oldest = state.conversations.findLastIndex((conversation) => conversation.id !== state.current);
      if (oldest < 0) return;
      state.conversations.splice(oldest, 1);
    }
  }
}

export const all = () => state.conversations;
export const current = () => state.conversations.find((conversation) => conversation.id === state.current) ?? create();

export function create() {
  const settings = { ...(state.conversations[0]?.settings ?? DEFAULTS) };
  const conversation = { id: crypto.randomUUID?.() ?? String(Date.now() + Math.random()), title: "", settings, nodes: [], leaf: null };
  // An empty one is enough.
  state.conversations = [conversation, ...state.conversations.filter((other) => other.nodes.length)];
  state.current = conversation.id;
  save();
  return conversation;
}

export function select(id) {
  state.current = id;
  save();
}

export function remove(id) {
  state.conversations = state.conversations.filter((conversation) => conversation.id !== id);
  if (state.current === id) state.current = state.conversations[0]?.id ?? null;
  save();
}

// A node: { parent: index or null, role, content, stats, error }. Its index is its name.
export function add(conversation, parent, role, content) {
  conversation.nodes.push({ parent, role, content });
  conversation.leaf = conversation.nodes.length - 1;
  conversation.title ||= content.trim().slice(0, 60);
  return conversation.leaf;
}

// Indices from the first message to the leaf.
export function path(conversation, leaf = conversation.leaf) {
  const indices = [];
  for (let i = leaf; i !== null; i = conversation.nodes[i].parent) indices.unshift(i);
  return indices;
}

export function siblings(conversation, index) {
  const { parent } = conversation.nodes[index];
  return conversation.nodes.flatMap((node, i) => (node.parent === parent ? [i] : []));
}

// Show this node, and below it what was added last.
export function show(conversation, index) {
  let leaf = index;
  for (let i = index + 1; i < conversation.nodes.length; i++) if (conversation.nodes[i].parent === leaf) leaf = i;
  conversation.leaf = leaf;
  save();
}
