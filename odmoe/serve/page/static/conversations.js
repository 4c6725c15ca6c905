// Conversations, kept in this browser alone.

const KEPT = "odmoe.conversations";
const CURRENT = "odmoe.conversation";
const MOST = 50;

/** A conversation: {id, title, changed, messages: [{role, content, reasoning, figures, error, stopped}]}. */
export class Conversations {
  constructor() {
    this.all = read();
    this.current = this.all.find((one) => one.id === localStorage.getItem(CURRENT)) ?? this.all[0] ?? this.add();
  }

  add() {
    const empty = this.all.find((one) => !one.messages.length);
    const found = empty ?? { id: crypto.getRandomValues(new Uint32Array(2)).join("-"), title: "", changed: Date.now(), messages: [] };
    if (!empty) this.all.unshift(found);
    this.choose(found.id);
    return found;
  }

  choose(id) {
    this.current = this.all.find((one) => one.id === id) ?? this.current;
    localStorage.setItem(CURRENT, this.current.id);
  }

  remove() {
    this.all = this.all.filter((one) => one !== this.current);
    this.current = this.all[0] ?? this.add();
    this.save();
    this.choose(this.current.id);
  }

  /** The oldest ones go where the browser has no room. */
  save() {
    this.current.changed = Date.now();
    const first = this.current.messages.find((one) => one.role === "user");
    this.current.title = first ? first.content.trim().replace(/\s+/g, " ").slice(0, 60) : "";
    this.all.sort((one, other) => other.changed - one.changed);
    this.all.length = Math.min(this.all.length, MOST);
    for (;;) {
      try {
        localStorage.setItem(KEPT, JSON.stringify(this.all));
        return;
      } catch {
        if (this.all.length < 2) return; // one conversation alone is too long; it lasts as long as the page
        this.all.pop();
      }
    }
  }
}

function read() {
  try {
    const found = JSON.parse(localStorage.getItem(KEPT) ?? "[]");
    return Array.isArray(found) ? found.filter((one) => Array.isArray(one?.messages)) : [];
  } catch {
    return [];
  }
}
