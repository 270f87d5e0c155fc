// Markdown to DOM nodes. Text only ever becomes text nodes: whatever a model writes, it cannot become markup or script.

const SAFE_LINK = /^(https?:|mailto:)/i;
const INLINE = /(`+)([^]*?[^`])\1(?!`)|!?\[([^\]\n]*)\]\(([^()\s]*(?:\([^()\s]*\)[^()\s]*)*)(?:\s+"[^"]*")?\)|(\*\*|__)(?=\S)([^]*?\S)\5|(~~)(?=\S)([^]*?\S)~~|(?<![\w*])\*(?=[^\s*])([^*]*?[^\s*])\*(?![\w*])|(?<![\w_])_(?=[^\s_])([^_]*?[^\s_])_(?![\w_])|(https?:\/\/[^\s<>()"']+[^\s<>()"'.,;:!?])|\\([\\`*_{}[\]()#+\-.!~|>])/;

// Nesting deeper than this is shown as it is written: a model may repeat ">" without end.
const MAX_DEPTH = 12;

export function render(text) {
  const fragment = document.createDocumentFragment();
  blocks(text.replace(/\r\n?/g, "\n").split("\n"), fragment, 0);
  return fragment;
}

function element(name, ...children) {
  const node = document.createElement(name);
  node.append(...children);
  return node;
}

function blocks(lines, parent, depth) {
  let i = 0;
  while (i < lines.length) {
    const line = lines[i];
    const fence = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/.exec(line);
    const heading = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/.exec(line);
    if (!line.trim()) {
      i++;
    } else if (fence) {
      i = code(lines, i, fence, parent);
    } else if (heading) {
      parent.append(inline(element(`h${Math.min(4, heading[1].length)}`), heading[2]));
      i++;
    } else if (/^ {0,3}([-*_])\s*(\1\s*){2,}$/.test(line)) {
      parent.append(element("hr"));
      i++;
    } else if (/^ {0,3}>/.test(line) && depth < MAX_DEPTH) {
      const quoted = [];
      for (; i < lines.length && /^ {0,3}>/.test(lines[i]); i++) quoted.push(lines[i].replace(/^ {0,3}> ?/, ""));
      const quote = element("blockquote");
      blocks(quoted, quote, depth + 1);
      parent.append(quote);
    } else if (item(line) && depth < MAX_DEPTH) {
      i = list(lines, i, parent, depth);
    } else if (line.includes("|") && /^[\s|:-]*-[\s|:-]*$/.test(lines[i + 1] ?? "") && lines[i + 1].includes("|")) {
      i = table(lines, i, parent);
    } else {
      // Indentation is kept: small models forget to fence their code.
      const paragraph = [line.trimEnd()];
      for (i++; i < lines.length && lines[i].trim() && !startsBlock(lines[i]); i++) paragraph.push(lines[i].trimEnd());
      parent.append(inline(element("p"), paragraph.join("\n")));
    }
  }
}

function startsBlock(line) {
  return /^ {0,3}(#{1,6}\s|>|`{3,}|~{3,})/.test(line) || item(line) !== null;
}

function code(lines, begin, [, mark, language], parent) {
  let end = begin + 1;
  while (end < lines.length && !lines[end].trim().startsWith(mark)) end++;
  const text = lines.slice(begin + 1, end).join("\n");
  const name = element("span", language.trim().split(/\s/)[0]);
  name.className = "muted small";
  const head = element("div", name);
  // Browsers give no clipboard to pages that came over plain HTTP from another machine.
  if (navigator.clipboard) head.append(copyButton(text));
  const box = element("div", head, element("pre", element("code", text)));
  box.className = "code";
  parent.append(box);
  return end + 1;
}

function copyButton(text) {
  const copy = element("button", "Copy");
  copy.type = "button";
  copy.className = "quiet";
  copy.addEventListener("click", async () => {
    await navigator.clipboard.writeText(text);
    copy.textContent = "Copied";
    setTimeout(() => { copy.textContent = "Copy"; }, 1500);
  });
  return copy;
}

function item(line) {
  return /^(\s*)([-*+]|\d{1,9}[.)])(?:\s+(.*)|)$/.exec(line);
}

function list(lines, begin, parent, depth) {
  const [, indent, mark] = item(lines[begin]);
  const ordered = /\d/.test(mark);
  const node = element(ordered ? "ol" : "ul");
  if (ordered) node.start = parseInt(mark, 10);
  let i = begin;
  while (i < lines.length) {
    const next = item(lines[i]);
    if (!next || next[1].length !== indent.length || /\d/.test(next[2]) !== ordered) break;
    const content = [next[3] ?? ""];
    for (i++; i < lines.length; i++) {
      const inner = item(lines[i]);
      const deeper = /^\s*/.exec(lines[i])[0].length > indent.length;
      if (!lines[i].trim()) {
        const after = lines[i + 1] ?? "";
        if (!(/^\s*/.exec(after)[0].length > indent.length) && item(after)?.[1].length !== indent.length) break;
        content.push("");
      } else if (deeper || (!inner && content.at(-1) !== "" && !startsBlock(lines[i]))) {
        content.push(lines[i].slice(Math.min(indent.length + mark.length + 1, /^\s*/.exec(lines[i])[0].length)));
      } else {
        break;
      }
    }
    const entry = element("li");
    while (content.at(-1) === "") content.pop();
    if (content.length === 1) inline(entry, content[0]);
    else blocks(content, entry, depth + 1);
    node.append(entry);
  }
  parent.append(node);
  return i;
}

function table(lines, begin, parent) {
  const cells = (line) => line.trim().replace(/^\|/, "").replace(/\|$/, "").split("|").map((cell) => cell.trim());
  const row = (line, kind) => element("tr", ...cells(line).map((cell) => inline(element(kind), cell)));
  const body = element("tbody");
  let i = begin + 2;
  for (; i < lines.length && lines[i].includes("|"); i++) body.append(row(lines[i], "td"));
  parent.append(element("table", element("thead", row(lines[begin], "th")), body));
  return i;
}

function inline(parent, text, depth = 0) {
  const pattern = new RegExp(INLINE, "g");
  let done = 0;
  for (let found; depth < MAX_DEPTH && (found = pattern.exec(text)); done = pattern.lastIndex) {
    plain(parent, text.slice(done, found.index));
    const [whole, , verbatim, label, target, , strong, , struck, em, under, bare, escaped] = found;
    if (verbatim !== undefined) parent.append(element("code", verbatim));
    else if (label !== undefined) parent.append(link(label || target, target, whole, depth));
    else if (strong !== undefined) parent.append(inline(element("strong"), strong, depth + 1));
    else if (struck !== undefined) parent.append(inline(element("s"), struck, depth + 1));
    else if (em !== undefined || under !== undefined) parent.append(inline(element("em"), em ?? under, depth + 1));
    else if (bare !== undefined) parent.append(link(bare, bare, whole, MAX_DEPTH));
    else plain(parent, escaped);
  }
  plain(parent, text.slice(done));
  return parent;
}

function plain(parent, text) {
  if (text) parent.append(text);
}

function link(label, target, whole, depth) {
  if (!SAFE_LINK.test(target)) return document.createTextNode(whole);
  const node = inline(element("a"), label, depth + 1);
  node.href = target;
  node.target = "_blank";
  node.rel = "noopener noreferrer";
  return node;
}
