// Requests to the service, with its key if it has one, and streams of server-sent events.

const KEY = "odmoe.key";

/** What the service, or the way to it, has refused: `status` is 0 where there was no answer. */
export class ServiceError extends Error {
  constructor(message, status = 0, code = "") {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export const key = {
  get() {
    return sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY) ?? "";
  },
  set(value, keep) {
    sessionStorage.setItem(KEY, value);
    if (keep) localStorage.setItem(KEY, value);
  },
  forget() {
    sessionStorage.removeItem(KEY);
    localStorage.removeItem(KEY);
  },
};

let asking = null;

/** Asks for the key, once for all who need it. */
function askForKey(wrong) {
  asking ??= new Promise((resolve) => {
    const dialog = document.getElementById("key-dialog");
    const form = document.getElementById("key-form");
    const input = document.getElementById("key");
    document.getElementById("key-why").textContent = wrong
      ? "The key is wrong. Whoever runs the service has it."
      : "This service needs a key. Whoever runs it has one.";
    input.value = "";
    dialog.oncancel = (event) => event.preventDefault();
    form.onsubmit = (event) => {
      event.preventDefault();
      key.set(input.value.trim(), document.getElementById("keep").checked);
      dialog.close();
      asking = null;
      resolve();
    };
    dialog.showModal();
    input.focus();
  });
  return asking;
}

/** A response that is no error. Paths are relative, so that a proxy may serve the page below any path. */
export async function request(path, { body, signal } = {}) {
  for (;;) {
    const sent = key.get();
    const headers = {};
    if (sent) headers.Authorization = `Bearer ${sent}`;
    if (body !== undefined) headers["Content-Type"] = "application/json";
    let response;
    try {
      response = await fetch(path, {
        method: body === undefined ? "GET" : "POST",
        headers,
        body: body === undefined ? undefined : JSON.stringify(body),
        signal,
        cache: "no-store",
        credentials: "same-origin",
      });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ServiceError("The service does not answer. Is it running, and is the network there?");
    }
    if (response.ok) return response;
    if (response.status === 401) {
      if (key.get() === sent) {
        key.forget();
        await askForKey(Boolean(sent));
      }
      continue;
    }
    throw await errorOf(response);
  }
}

async function errorOf(response) {
  const found = await response.json().catch(() => null);
  const told = found?.error;
  return new ServiceError(told?.message ?? `The service answered with status ${response.status}.`, response.status, told?.code);
}

/** The objects of a stream. Raises ServiceError for an error event, and where the stream breaks off. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest += value;
      const parts = rest.split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        if (!part.startsWith("data: ")) continue;
        const data = part.slice(6);
        if (data === "[DONE]") return;
        const found = JSON.parse(data);
        if (found.error) throw new ServiceError(found.error.message, 200, found.error.code);
        yield found;
      }
    }
  } catch (error) {
    if (error instanceof ServiceError || error.name === "AbortError") throw error;
    throw new ServiceError("The connection to the service was lost.");
  } finally {
    reader.cancel().catch(() => {});
  }
}
