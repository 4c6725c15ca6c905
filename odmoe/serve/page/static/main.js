// The page: a chat at the left, the cluster at the right.

import { request } from "./api.js";
import { Chat } from "./chat.js";
import { Cluster } from "./cluster.js";

const chat = new Chat();
const cluster = new Cluster();

for (const button of document.querySelectorAll("nav button")) {
  button.addEventListener("click", () => {
    document.body.dataset.view = button.dataset.show;
    for (const one of document.querySelectorAll("nav button")) one.setAttribute("aria-pressed", String(one === button));
    cluster.grid.resize();
  });
}

async function begin() {
  for (;;) {
    try {
      const found = await (await request("cluster")).json();
      document.title = `${found.model} · OD-MoE`;
      document.getElementById("model").textContent = found.model;
      chat.describe(found);
      cluster.describe(found);
      if (!document.hidden) cluster.watch();
      cluster.comparePlan();
      return;
    } catch (error) {
      cluster.setLink("lost", error.message);
      await new Promise((resolve) => setTimeout(resolve, 3000));
    }
  }
}

begin();
