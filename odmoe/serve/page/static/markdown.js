// Markdown as nodes of the document. Nothing of an answer is ever read as HTML.

const SAFE = /^(https?:\/\/|mailto:)/i;
const INLINE = new RegExp(
  [
    "(`+)(.+?)\\1(?!`)", // 1, 2: code
    "\\*\\*(?=\\S)(.+?)(?<=\\S)\\*\\*", // 3: strong
    "(?<![\\w*])\\*(?=\\S)([^*]+?)(?<=\\S)\\*(?![\\w*])", // 4: emphasis
    "(?<!\\w)_(?=\\S)([^_]+?)(?<=\\S)_(?!\\w)", // 5: emphasis
    "~~(?=\\S)(.+?)~~", // 6: struck
    "!?\\[([^\\]]*)\\]\\(([^\\s)]+)[^)]*\\)", // 7, 8: link; an image is shown as one
    "(https?:\\/\\/[^\\s<>\"')\\]]*[^\\s<>\"')\\].,;:!?])", // 9: address
  ].join("|"),
  "gs",
);
const KEYWORDS = new Set(
  ("abstract and as assert async await begin break case catch class const continue def default defer del do done echo elif else " +
    "end enum except export extends extern fi final finally fn for from func function go goto if impl implements import in " +
    "interface is lambda let local loop match mod module mut namespace new nil None not null of or package pass private " +
    "protected public raise return self select static struct super switch then this throw trait true false True False try " +
    "type typeof undefined union unsafe use using var void when where while with yield SELECT FROM WHERE JOIN INSERT UPDATE " +
    "DELETE CREATE TABLE INTO VALUES ORDER GROUP BY AND OR NOT int float double char bool string long short unsigned").split(" "),
);
const HASHES = /^(py|python|sh|bash|zsh|shell|console|yaml|yml|toml|ruby|rb|perl|r|make|makefile|dockerfile|ini|conf)$/i;
const RULE = /^\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?$/; // under a table's head
const MOST_DEPTH = 20; // of quotations and lists in one another; what is deeper is a paragraph
const PLAIN = /^(text|txt|plain|output|)$/i;

export function element(name, className, text) {
  const found = document.createElement(name);
  if (className) found.className = className;
  if (text !== undefined) found.textContent = text;
  return found;
}

/** Shows `text` in `container`. Blocks that are the same as before stay, so that a growing answer costs its last block. */
export function render(container, text, depth = 0) {
  const blocks = split(text);
  const before = container.blocks ?? [];
  let same = 0;
  while (same < blocks.length && same < before.length && blocks[same] === before[same]) same += 1;
  while (container.childNodes.length > same) container.lastChild.remove();
  for (const block of blocks.slice(same)) container.append(build(block, depth));
  container.blocks = blocks;
}

/** Blocks: a fence, a list, a table, a quotation, a heading or a paragraph each. */
export function split(text) {
  const blocks = [];
  let lines = [];
  let fence = "";
  const end = () => {
    if (lines.length) blocks.push(lines.join("\n"));
    lines = [];
  };
  for (const line of text.replace(/\r\n?/g, "\n").split("\n")) {
    const mark = line.match(/^ {0,3}(`{3,}|~{3,})/)?.[1];
    if (fence) {
      lines.push(line);
      if (mark && mark[0] === fence[0] && mark.length >= fence.length && line.trim() === mark) {
        fence = "";
        end();
      }
    } else if (mark) {
      end();
      fence = mark;
      lines.push(line);
    } else if (!line.trim()) {
      if (lines.length && isItem(lines[0])) lines.push(line);
      else end();
    } else if (/^ {0,3}(#{1,6}\s|([-*_] *){3,}$)/.test(line) && !isItem(line)) {
      end();
      blocks.push(line);
    } else {
      const inList = lines.length && isItem(lines[0]);
      const after = lines.length && !lines[lines.length - 1].trim();
      if (inList && after && !isItem(line) && !/^\s{2,}/.test(line)) end();
      else if (lines.length && !inList && (isItem(line) || isQuote(line) !== isQuote(lines[0]))) end();
      lines.push(line);
    }
  }
  end();
  return blocks;
}

const isItem = (line) => /^\s*([-*+]|\d{1,9}[.)])\s+\S/.test(line);
const isQuote = (line) => /^ {0,3}>/.test(line);

function build(block, depth) {
  const lines = block.split("\n");
  const first = lines[0];
  if (depth > MOST_DEPTH) return element("p", "", block);
  if (/^ {0,3}(`{3,}|~{3,})/.test(first)) return fenced(lines);
  const heading = first.match(/^ {0,3}(#{1,6})\s+(.*?)\s*#*$/);
  if (heading) return filled(element(`h${Math.min(6, heading[1].length + 2)}`), heading[2]);
  if (/^ {0,3}([-*_] *){3,}$/.test(first)) return element("hr");
  if (isQuote(first)) {
    const quote = element("blockquote");
    render(quote, lines.map((line) => line.replace(/^ {0,3}> ?/, "")).join("\n"), depth + 1);
    return quote;
  }
  if (isItem(first)) return list(lines, depth);
  if (lines.length > 1 && first.includes("|") && RULE.test(lines[1].trim())) return table(lines);
  return filled(element("p"), block);
}

function fenced(lines) {
  const open = lines[0].match(/^ {0,3}(`{3,}|~{3,})\s*(\S*)/);
  const last = lines[lines.length - 1].trim();
  const closed = lines.length > 1 && last.startsWith(open[1]);
  return codeBlock(lines.slice(1, closed ? -1 : undefined).join("\n"), open[2]);
}

/** Code with its language and a button that copies it. */
export function codeBlock(text, language) {
  const frame = element("div", "code");
  const bar = element("div");
  const button = element("button", "", "Copy");
  button.setAttribute("aria-label", "Copy the code");
  button.type = "button";
  button.addEventListener("click", () => copy(text, button));
  bar.append(element("span", "", language || "code"), button);
  const pre = element("pre");
  const code = element("code");
  highlight(code, text, language);
  pre.append(code);
  frame.append(bar, pre);
  return frame;
}

export async function copy(text, button) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed"; // no HTTPS, and not this machine
  }
  setTimeout(() => (button.textContent = before), 1200);
}

function list(lines, depth) {
  const ordered = /^\s*\d/.test(lines[0]);
  const found = element(ordered ? "ol" : "ul");
  if (ordered) found.start = Number(lines[0].match(/\d+/)[0]);
  const indent = lines[0].match(/^\s*/)[0].length;
  const items = [];
  for (const line of lines) {
    const item = line.match(/^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/);
    if (item && item[1].length <= indent + 1) items.push([item[3]]);
    else items[items.length - 1].push(line.replace(new RegExp(`^\\s{0,${indent + 2}}`), ""));
  }
  for (const item of items) {
    const entry = element("li");
    const rest = item.slice(1).join("\n").trimEnd();
    if (rest.trim()) {
      const nested = element("div");
      render(nested, `${item[0]}\n${rest}`, depth + 1);
      entry.append(...nested.childNodes);
    } else filled(entry, item[0]);
    found.append(entry);
  }
  return found;
}

function table(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/);
  const found = element("table");
  for (const [number, line] of lines.entries()) {
    if (number === 1) continue;
    const row = element("tr");
    for (const cell of cells(line)) row.append(filled(element(number ? "td" : "th"), cell.trim().replaceAll("\\|", "|")));
    found.append(row);
  }
  const frame = element("div", "table");
  frame.append(found);
  return frame;
}

/** `parent` with the inline parts of a text. */
function filled(parent, text) {
  let at = 0;
  for (const match of text.matchAll(INLINE)) {
    plain(parent, text.slice(at, match.index));
    parent.append(inline(match));
    at = match.index + match[0].length;
  }
  plain(parent, text.slice(at));
  return parent;
}

function inline(match) {
  const [whole, , code, strong, emphasis, other, struck, label, target, address] = match;
  if (code !== undefined) return element("code", "", code.trim() || code);
  if (strong !== undefined) return filled(element("strong"), strong);
  if (emphasis !== undefined || other !== undefined) return filled(element("em"), emphasis ?? other);
  if (struck !== undefined) return filled(element("s"), struck);
  const to = target ?? address;
  if (!SAFE.test(to)) return document.createTextNode(whole);
  const link = element("a");
  link.href = to;
  link.target = "_blank";
  link.rel = "noopener noreferrer";
  link.textContent = label || to;
  return link;
}

function plain(parent, text) {
  const lines = text.replace(/\\([\\`*_{}[\]()#+\-.!|~>])/g, "$1").split(/ {2,}\n|\\\n/);
  for (const [number, line] of lines.entries()) {
    if (number) parent.append(element("br"));
    if (line) parent.append(line);
  }
}

function highlight(code, text, language) {
  if (PLAIN.test(language) || text.length > 20000) {
    code.textContent = text;
    return;
  }
  const comment = HASHES.test(language) ? "#.*" : /^(sql|lua|haskell|hs)$/i.test(language) ? "--.*" : "//.*|/\\*[\\s\\S]*?\\*/";
  const tokens = new RegExp(
    `(${comment})|("""[\\s\\S]*?"""|"(?:\\\\.|[^"\\\\\\n])*"|'(?:\\\\.|[^'\\\\\\n])*'|\`(?:\\\\.|[^\`\\\\])*\`)|(\\b\\d[\\w.]*)|([A-Za-z_]\\w*)`,
    "g",
  );
  let at = 0;
  for (const match of text.matchAll(tokens)) {
    const kind = match[1] ? "c" : match[2] ? "s" : match[3] ? "n" : KEYWORDS.has(match[4]) ? "k" : "";
    if (!kind) continue;
    code.append(text.slice(at, match.index), element("span", kind, match[0]));
    at = match.index + match[0].length;
  }
  code.append(text.slice(at));
}
