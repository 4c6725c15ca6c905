// The chat: messages, the answer that is being written, and what is done with them.

import { events, request } from "./api.js";
import { Conversations } from "./conversations.js";
import { codeBlock, copy, element, render } from "./markdown.js";

const DRAW_MS = 80;
const SAVE_MS = 1500;
const OPTIONS = ["system", "temperature", "most"];
const by = (id) => document.getElementById(id);

export class Chat {
  constructor() {
    this.kept = new Conversations();
    this.cluster = { model: "", chat: true };
    this.abort = null;
    this.messages = by("messages");
    by("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    by("input").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !matchMedia("(pointer: coarse)").matches) {
        event.preventDefault();
        this.send();
      }
    });
    by("input").addEventListener("input", fit);
    by("stop").addEventListener("click", () => this.abort?.abort());
    by("new").addEventListener("click", () => this.show(() => this.kept.add()));
    by("remove").addEventListener("click", () => {
      if (!this.kept.current.messages.length || confirm("Delete this conversation?")) this.show(() => this.kept.remove());
    });
    by("conversations").addEventListener("change", (event) => this.show(() => this.kept.choose(event.target.value)));
    by("options-open").addEventListener("click", (event) => {
      by("options").hidden = !by("options").hidden;
      event.target.setAttribute("aria-expanded", String(!by("options").hidden));
    });
    for (const name of OPTIONS) {
      by(name).value = localStorage.getItem(`odmoe.${name}`) ?? "";
      by(name).addEventListener("change", () => localStorage.setItem(`odmoe.${name}`, by(name).value));
    }
    this.draw();
  }

  /** `cluster`: as /cluster describes it. */
  describe(cluster) {
    this.cluster = cluster;
    by("plain").hidden = cluster.chat;
    by("input").placeholder = cluster.chat ? "Ask something" : "Begin a text";
    by("system").closest("label").hidden = !cluster.chat;
    this.draw();
  }

  /** Another conversation. An answer under way ends. */
  show(change) {
    this.abort?.abort();
    change();
    this.draw();
    by("input").focus();
  }

  draw() {
    const list = by("conversations");
    list.replaceChildren(
      ...this.kept.all.map((one) => {
        const option = element("option", "", one.title || "New conversation");
        option.value = one.id;
        option.selected = one === this.kept.current;
        return option;
      }),
    );
    this.messages.dataset.empty = this.cluster.chat
      ? `Say something to ${this.cluster.model || "the model"}.`
      : "Begin a text, and the model goes on with it.";
    this.messages.replaceChildren(...this.kept.current.messages.map((one, at) => this.article(one, at)));
    this.messages.scrollTop = this.messages.scrollHeight;
  }

  article(message, at) {
    const found = element("article", message.role);
    found.setAttribute("aria-label", message.role === "user" ? "You" : this.cluster.model || "The model");
    found.message = message;
    found.at = at;
    const body = element("div", "body");
    found.append(body, element("footer"));
    this.fill(found);
    return found;
  }

  /** What a message's article shows, anew. */
  fill(article) {
    const { message } = article;
    const body = article.querySelector(".body");
    if (message.role === "user") body.textContent = message.content;
    else if (!this.cluster.chat) {
      article.classList.add("continued");
      body.textContent = message.content;
    } else {
      try {
        render(body, message.content);
      } catch {
        body.blocks = undefined;
        body.textContent = message.content;
      }
    }
    this.fillThinking(article);
    this.fillTools(article);
    article.querySelector(".error")?.remove();
    if (message.error) body.after(element("div", "error", message.error));
    article.querySelector("footer").replaceChildren(...this.footer(article));
  }

  fillThinking(article) {
    const { message } = article;
    let thinking = article.querySelector(".thinking");
    if (!message.reasoning) {
      thinking?.remove();
      return;
    }
    if (!thinking) {
      thinking = element("details", "thinking");
      thinking.append(element("summary"), element("div"));
      article.prepend(thinking);
    }
    const under = message.writing && !message.content;
    thinking.firstChild.textContent = under ? "Thinking …" : "Thinking";
    thinking.lastChild.textContent = message.reasoning;
  }

  fillTools(article) {
    for (const one of article.querySelectorAll(".tool")) one.remove();
    for (const call of article.message.tools ?? []) {
      const shown = element("div", "tool");
      shown.append(codeBlock(call.arguments, `calls ${call.name}`));
      article.querySelector("footer").before(shown);
    }
  }

  footer(article) {
    const { message, at } = article;
    const button = (text, act) => {
      const found = element("button", "", text);
      found.type = "button";
      found.addEventListener("click", () => act(found));
      return found;
    };
    const parts = [];
    if (message.figures) parts.push(element("span", "speed", message.figures));
    if (message.stopped) parts.push(element("span", "", "stopped"));
    if (message.writing) return parts;
    parts.push(button("Copy", (found) => copy(message.content, found)));
    if (message.role === "user") parts.push(button("Edit", () => this.edit(article)));
    else parts.push(button("Again", () => this.answer(at)));
    return parts;
  }

  edit(article) {
    const { message, at } = article;
    const area = element("textarea");
    area.setAttribute("aria-label", "Message, edited");
    area.value = message.content;
    const save = element("button", "", "Send");
    const leave = element("button", "", "Cancel");
    save.type = leave.type = "button";
    const send = () => {
      if (!area.value.trim()) return;
      message.content = area.value;
      this.answer(at + 1);
    };
    save.addEventListener("click", send);
    area.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send();
      if (event.key === "Escape") this.fill(article);
    });
    leave.addEventListener("click", () => this.fill(article));
    article.querySelector(".body").replaceChildren(area);
    article.querySelector(".body").blocks = undefined;
    article.querySelector("footer").replaceChildren(save, leave);
    area.focus();
  }

  send() {
    const text = by("input").value;
    if (!text.trim() || this.abort) return;
    by("input").value = "";
    fit();
    const { messages } = this.kept.current;
    messages.push({ role: "user", content: text });
    this.answer(messages.length);
  }

  /** Answers what comes before message `at`; what was there from `at` on goes. */
  async answer(at) {
    this.abort?.abort();
    const abort = (this.abort = new AbortController());
    const conversation = this.kept.current;
    conversation.messages.length = at;
    const message = { role: "assistant", content: "", reasoning: "", writing: true };
    conversation.messages.push(message);
    this.kept.save();
    this.draw();
    this.setWriting(true);
    const article = this.messages.lastChild;
    article.classList.add("writing");
    const writer = new Writer(message, () => this.onWritten(article));
    try {
      const response = await request(...this.body(conversation.messages.slice(0, at), abort.signal));
      for await (const event of events(response)) writer.take(event);
    } catch (error) {
      if (abort.signal.aborted) message.stopped = true;
      else message.error = error.message;
    }
    writer.end();
    delete message.writing;
    article.classList.remove("writing");
    if (this.abort === abort) {
      this.abort = null;
      this.setWriting(false);
    }
    this.fill(article);
    this.stick();
    this.kept.save();
  }

  body(messages, signal) {
    const body = { model: this.cluster.model, stream: true, stream_options: { include_usage: true } };
    if (by("temperature").value !== "") body.temperature = Number(by("temperature").value);
    const most = by("most").value === "" ? null : Number(by("most").value);
    if (!this.cluster.chat) {
      body.prompt = messages.map((one) => one.content).join("");
      body.max_tokens = most ?? 200;
      return ["v1/completions", { body, signal }];
    }
    const system = by("system").value.trim();
    body.messages = messages
      .filter((one) => one.role === "user" || one.content)
      .map(({ role, content }) => ({ role, content }));
    if (system) body.messages.unshift({ role: "system", content: system });
    if (most) body.max_tokens = most;
    return ["v1/chat/completions", { body, signal }];
  }

  onWritten(article) {
    const near = this.isNearEnd();
    this.fill(article);
    if (near) this.stick();
    const now = performance.now();
    if (now - (this.saved ?? 0) > SAVE_MS) {
      this.saved = now;
      this.kept.save();
    }
  }

  isNearEnd() {
    return this.messages.scrollHeight - this.messages.scrollTop - this.messages.clientHeight < 80;
  }

  stick() {
    this.messages.scrollTop = this.messages.scrollHeight;
  }

  setWriting(on) {
    this.messages.setAttribute("aria-busy", String(on)); // read out once it is whole
    by("send").hidden = on;
    by("stop").hidden = !on;
  }
}

/** Takes the chunks of an answer into its message, and has it drawn a few times a second. */
class Writer {
  constructor(message, drawn) {
    this.message = message;
    this.drawn = drawn;
    this.asked = performance.now();
    this.first = null;
    this.last = null;
    this.tokens = 0;
    this.timer = null;
  }

  take(event) {
    const { message } = this;
    const choice = event.choices?.[0];
    const delta = choice?.delta ?? {};
    const text = choice?.text ?? delta.content ?? "";
    if (text || delta.reasoning_content || delta.tool_calls) {
      this.last = performance.now();
      this.first ??= this.last;
      this.tokens += 1; // a chunk has one or more; the usage has the true number
    }
    message.content += text;
    message.reasoning += delta.reasoning_content ?? "";
    for (const piece of delta.tool_calls ?? []) {
      message.tools ??= [];
      const call = (message.tools[piece.index ?? 0] ??= { name: "", arguments: "" });
      call.name += piece.function?.name ?? "";
      call.arguments += piece.function?.arguments ?? "";
    }
    if (event.usage) {
      this.tokens = event.usage.completion_tokens;
      this.prompt = event.usage.prompt_tokens;
      this.known = true;
    }
    if (choice?.finish_reason === "length") message.cut = true;
    this.timer ??= setTimeout(() => {
      this.timer = null;
      this.measure();
      this.drawn();
    }, DRAW_MS);
  }

  measure() {
    if (this.first === null) return;
    const span = (this.last - this.first) / 1000;
    const rate = this.tokens > 1 && span > 0 ? `${((this.tokens - 1) / span).toFixed(1)} tokens/s` : "";
    const wait = `first after ${((this.first - this.asked) / 1000).toFixed(1)} s`;
    const count = this.known ? `${this.tokens} tokens` : "";
    this.message.figures = [rate, count, wait, this.message.cut ? "cut at its most tokens" : ""].filter(Boolean).join(" · ");
  }

  end() {
    clearTimeout(this.timer);
    this.measure();
  }
}

function fit() {
  const input = by("input");
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight + 2}px`;
}
