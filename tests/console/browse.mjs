// Looks at every page of a console in headless Chromium, and has the process of node-1 stand still meanwhile:
// node browse.mjs CHROMIUM ADDRESS ADMIN'S-ADDRESS PROCESS [PICTURES]

import assert from "node:assert/strict";
import { chromium } from "playwright-core";

const [executablePath, address, adminsAddress, standsStill, pictures] = process.argv.slice(2);
const say = (part, text) => console.log(`${part.padEnd(12)} ${text}`);
const browser = await chromium.launch({ executablePath, args: ["--no-sandbox"] });
// A slow machine takes long for a page.
const PATIENCE_MS = 120_000;
const open = async (viewport = { width: 1200, height: 800 }) => {
  const page = await (await browser.newContext({ viewport })).newPage();
  page.setDefaultTimeout(PATIENCE_MS);
  return page;
};
const page = await open();
const faults = [];
page.on("pageerror", (error) => faults.push(error.message));
page.on("console", (message) => message.type() === "error" && faults.push(message.text()));
const foreign = [];
page.on("request", (request) => !/^(data:|blob:)/.test(request.url()) && !request.url().startsWith(address) && foreign.push(request.url()));

const picture = async (name, fullPage = false) => {
  if (pictures) await page.screenshot({ path: `${pictures}/console-${name}.png`, fullPage });
};
const heading = (text) => page.getByRole("heading", { level: 1, name: text }).waitFor();

// Cluster: a tile for each node, and the one that stands still.
await page.goto(address);
await heading("Cluster");
await page.locator("article.tile").nth(2).waitFor();
const paint = await page.evaluate(() => performance.getEntriesByName("first-contentful-paint")[0].startTime);
say("first paint", `${(paint / 1000).toFixed(2)} s, at most 1 s`);
// Not before: members that stand still for seconds are removed, and a browser may take long to start.
process.kill(Number(standsStill), "SIGSTOP");
await page.locator("article.bad", { hasText: "node-1" }).waitFor();
say("cluster", `${await page.locator("article.tile").count()} nodes, the silent one is marked`);
await picture("cluster");
const links = page.getByRole("table", { name: "Links" });
await links.locator("td.heat-5").first().waitFor();
say("links", await links.locator("td[title]").first().getAttribute("title"));

// Why was this a miss? By keyboard: the page by its digit, a lookup by its button.
await page.keyboard.press("2");
await heading("Why was this a miss?");
const row = page.getByRole("table", { name: "Lookups" }).getByRole("row", { name: /evicted/ }).first();
await row.waitFor();
const named = await row.getByRole("button").innerText();
await row.getByRole("button").focus();
await page.keyboard.press("Enter");
const reasons = page.getByRole("region", { name: "Why was this a miss?" });
await reasons.getByText(/Evicted by (watermark|need|clearing)/).first().waitFor();
say("why", `${named}: ${await reasons.getByText(/Evicted by/).first().innerText()}`);
await picture("why");
await page.getByLabel("Request or trace id").fill(named);
await page.getByRole("button", { name: "Find" }).click();
await page.getByRole("heading", { name: `Lookups of ${named}` }).waitFor();

// The last hour, and the links by another measure; meanwhile the silent node counts as lost.
await page.goto(`${address}#cluster`);
await page.getByRole("group", { name: "The last hour" }).getByText(/tokens asked: /).waitFor();
await page.getByRole("table", { name: "Lost nodes" }).getByRole("row", { name: /node-1/ }).waitFor();
await page.getByRole("region", { name: "Advice" }).getByText(/start the node again/).waitFor();
await page.getByLabel("Colour by").selectOption("packets lost");
await links.getByText(/\d %/).first().waitFor();
await page.getByLabel("Colour by").selectOption("round trip");
await links.getByText(/\d ms/).first().waitFor();
await page.getByLabel("Colour by").selectOption("bytes sent");
await picture("links", true);

// Prompt explorer: the same request by its name.
await page.goto(`${address}#prompt`);
await heading("Prompt explorer");
await page.locator("select option").first().waitFor({ state: "attached" });
await page.getByLabel(/Token ids/).fill(named);
await page.getByRole("button", { name: "Look up" }).click();
await page.getByText(/All nodes together hold/).waitFor();
await picture("prompt");
say("prompt", await page.getByText(/All nodes together hold/).innerText());
await page.getByLabel(/Token ids/).fill(Array.from({ length: 1024 }, (_, token) => token).join(" "));
await page.getByRole("button", { name: "Look up" }).click();
await page.getByText(/only engines hash the chunks/).waitFor();
// The text of a prompt, by the tokenizer of its namespace's model. No engine of that model is here: the namespace is made up.
const made = { tenant: "default", model: "two/words", fingerprint: "ab".repeat(32), chunk_tokens: 16, hash: { name: "larder" }, sessions: 0, chunks: 0 };
await page.route("**/console/nodes?path=%2Fnamespaces", async (route) => {
  const answer = await route.fetch();
  const said = await answer.json();
  for (const one of said) one.said?.push(made);
  await route.fulfill({ response: answer, json: said });
});
const words = page.locator("select option", { hasText: "two/words" });
await page.getByLabel("Namespace").selectOption(await words.getAttribute("value"));
for (const [kind, tokens] of [["text", 41], ["bare", 40]]) {
  await page.getByLabel("Kind of input").selectOption(kind);
  await page.getByLabel("The prompt's text").fill("a chunk ".repeat(20));
  await page.getByRole("button", { name: "Look up" }).click();
  await page.getByText(new RegExp(`The text has ${tokens} tokens\\. All nodes together hold 0 of 2 chunks`)).waitFor();
}
say("text", await page.getByText(/The text has/).innerText());
await page.unroute("**/console/nodes?path=%2Fnamespaces");
await page.getByLabel("Kind of input").selectOption("ids");

await page.goto(`${address}#tenants`);
await heading("Tenants and namespaces");
const space = page.getByRole("table", { name: "Namespaces" }).getByRole("row").nth(1);
await space.waitFor();
say("tenants", `namespace ${(await space.innerText()).replaceAll(/\s+/g, " ")}`);
await page.emulateMedia({ colorScheme: "dark" });
const ground = await page.evaluate(() => getComputedStyle(document.body).backgroundColor);
assert.match(ground, /rgb\(2\d, 2\d, 2\d\)/, "dark where the system is dark");
const prefixes = page.getByRole("table", { name: "Prefixes" });
await prefixes.getByRole("row").nth(1).waitFor();
assert.notEqual(await page.getByLabel("Node").inputValue(), "node-1", "a node that answers is shown first");
say("prefixes", (await prefixes.getByRole("row").nth(1).innerText()).replaceAll(/\s+/g, " "));
await page.getByText(/of prefill saved/).first().waitFor();
await picture("tenants");
await page.route("**/console/nodes?path=%2Fprefixes&node=node-2", (route) => route.fulfill({ json: [{ node: "node-2", said: [], error: null }] }));
await page.getByLabel("Node").selectOption("node-2");
await page.getByText("No prompts with a common beginning are among the last lookups of node-2.").waitFor();

// What if: the lookups of the replay through other caches.
await page.emulateMedia({ colorScheme: "light" });
await page.goto(`${address}#what-if`);
await heading("What if?");
const sizes = page.getByRole("table", { name: "Sizes" });
await sizes.waitFor();
await page.getByText("Lookups are being played.").waitFor({ state: "detached" });
const rate = async (name) => Number.parseFloat(await sizes.getByRole("row", { name }).getByRole("cell").nth(4).innerText());
const rates = [await rate("as it is"), await rate("2 times"), await rate("never evicts")];
assert.ok(rates[0] < rates[1] && rates[1] <= rates[2], `more memory hits more: ${rates}`);
assert.ok((await page.getByRole("table", { name: "Policies" }).getByRole("row").count()) > 5, "and policies are compared");
const ways = page.getByRole("table", { name: "Ways" });
const ofWay = async (name) => Number.parseFloat(await ways.getByRole("row", { name }).getByRole("cell").nth(4).innerText());
const [together, apart] = [await ofWay("as it is"), await ofWay("no node reads others' chunks")];
assert.equal(together, rates[0], "the present cluster is one and the same");
assert.ok(apart < together, `nodes that read each other's chunks hit more: ${apart} against ${together}`);
const moved = async (name) => Number.parseFloat(await ways.getByRole("row", { name }).getByRole("cell").nth(6).innerText());
assert.ok((await moved("as it is")) > 0 && (await moved("no node reads others' chunks")) === 0);
say("what if", `${apart} % where no node reads others' chunks, ${await ofWay("a router")} % where a router chooses the node`);
say("what if", `${rates[0]} % of tokens as it is, ${rates[1]} % with twice the memory, ${rates[2]} % without evictions`);
await picture("what-if", true);
assert.deepEqual(foreign, [], "nothing comes from elsewhere");
assert.deepEqual(faults, []);

// A reader has no buttons; a wrong token changes nothing; the admin's sets a policy and drains a node.
for (const [pageName, shown] of [["cluster", page.locator("article.tile p").first()], ["tenants", space]]) {
  await page.goto(`${address}#${pageName}`);
  await shown.waitFor();
  assert.equal(await page.getByRole("button", { name: /Drain|Forget|Pin|Purge|Set on all/ }).count(), 0, "a reader changes nothing");
}
const tile = (of, name) => of.locator("article.tile", { has: of.getByRole("heading", { name: new RegExp(name) }) });
const press = async (of, name) => {
  await of.getByRole("button", { name, exact: true }).click();
  await of.getByRole("button", { name: `${name}: sure?` }).click();
};
const stranger = await open();
await stranger.goto(address);
await tile(stranger, "node-0").waitFor();
// The tab that shows the console takes the token, though its percent sign stands for itself.
await stranger.goto(`${address}#token=wrong%`);
await press(tile(stranger, "node-0"), "Drain");
await stranger.getByText(/a change needs the admin's token/).waitFor();
const admin = await open();
await admin.goto(adminsAddress);
await tile(admin, "node-0").waitFor();
assert.equal(new URL(admin.url()).hash, "", "the token stays out of the address");
await admin.getByLabel("Eviction policy").selectOption("lru");
await press(admin, "Set on all nodes");
await tile(admin, "node-0").getByText(/sessions, lru/).waitFor();
const results = admin.locator("div.fields").getByRole("status").or(admin.locator("div.fields").getByRole("alert"));
await results.filter({ hasText: /^Done at \d nodes?\.$/ }).waitFor();
await results.filter({ hasText: /node-1: it is lost/ }).waitFor();
await admin.getByLabel("Eviction policy").selectOption("fifo");
assert.equal(await results.count(), 0, "another change has no result yet");
const lost = admin.getByRole("table", { name: "Lost nodes" }).getByRole("row", { name: /node-1/ });
await press(lost, "Forget");
await lost.waitFor({ state: "detached" });

// Pins a prompt that is there, ends the pin, and purges the prompt and its namespace.
await admin.goto(`${address}#prompt`);
await admin.locator("select option").first().waitFor({ state: "attached" });
// Memories keep few prompts: one that is still there.
const last = await (await admin.request.get(`${address}console/nodes?path=/lookups?most=50`)).json();
const requests = last.flatMap((one) => one.said ?? []).sort((a, b) => b.unix_ms - a.unix_ms).map((one) => one.request).filter(Boolean);
let held = 0;
for (const request of requests) {
  await admin.getByLabel(/Token ids/).fill(request);
  await admin.getByRole("button", { name: "Look up" }).click();
  await admin.getByRole("region", { name: `Chunks of ${request}` }).waitFor();
  held = Number.parseInt(/hold ([\d,]+)/.exec(await admin.getByText(/All nodes together hold/).innerText())[1].replaceAll(",", ""), 10);
  if (held > 0) break;
}
assert.ok(held > 0, `none of ${requests} is held`);
await press(admin, "Pin for 10 minutes");
const pinned = admin.getByRole("status").filter({ hasText: /Pinned at/ });
await pinned.waitFor();
const stays = admin.getByRole("table", { name: "Stays" });
const unpromised = await stays.getByText(/No time is promised|no time is promised: last used/).count();
assert.ok((await stays.getByRole("row").count()) > 1 && unpromised > 0, "chunks in memory say until when they stay");
await admin.getByRole("button", { name: "Look up" }).click();
await stays.getByText(/Pinned for another (10 min|\d+ s); after that no time is promised/).first().waitFor();
await admin.keyboard.press("4");
const pins = admin.getByRole("table", { name: "Pins" });
await pins.getByRole("button", { name: "Unpin" }).first().waitFor();
const counted = await pins.getByRole("button", { name: "Unpin" }).count();
await press(pins.getByRole("row").nth(1), "Unpin");
await admin.waitForFunction(
  (before) => [...document.querySelectorAll("button")].filter((one) => one.textContent === "Unpin").length < before,
  counted,
);
await press(admin.getByRole("table", { name: "Namespaces" }), "Purge");
const purged = admin.getByRole("status").filter({ hasText: /chunks in memory/ });
await purged.waitFor();
say("admin", `${counted} pins, one ended; purged: ${await purged.innerText()}`);
await admin.goto(`${address}#cluster`);
await tile(admin, "node-0").waitFor();
await press(tile(admin, "node-0"), "Drain");
const state = async () => (await (await admin.request.get(`${address}status`)).json()).nodes.find((node) => node.name === "node-0")?.state;
let seen = await state();
for (const from = Date.now(); seen === "alive" && Date.now() - from < PATIENCE_MS; ) {
  await admin.waitForTimeout(50);
  seen = await state();
}
assert.notEqual(seen, "alive", "it drains, or has left");
say("admin", `refused as a stranger; set a policy; had a lost node forgotten; drained a node, which ${seen === "draining" ? "drains" : "has left"}`);

// A cluster of 256 nodes, and a prompt of 10,000 chunks with as many outcomes: made up here, to see how the page copes.
const names = Array.from({ length: 256 }, (_, number) => `node-${number}`);
const member = (name) => ({ name, http: "10.0.0.1:9440", state: "alive", devices: 8, partitions: 64, protocol: 2, silent_seconds: 0.1 });
const actor = { device: 0, policy: "lru", chunks: 9, arena_bytes: 9e9, used_bytes: 5e9, tokens_asked: 9, tokens_hit: 3, evictions: 1, sessions: 2, disk: null, disk_trouble: null };
const zone = (name) => `rack-${Number(name.slice(5)) % 4}`;
const node = (name) => ({ name, version: "1", ready: true, uptime_seconds: 9, actors: Array(8).fill(actor), cluster: { epoch: name === "node-9" ? "1.0" : "1.1", members: 256, silent: [], zone: zone(name), refused: null }, drain: null });
const runs = Array.from({ length: 10_000 }, (_, from) => ({ from, to: from + 1, outcome: from % 2 ? "evicted" : "behind_gap", tier: "host", evicted: from % 2 ? { unix_ms: 1, rule: "need", worth: 1 } : null }));
const finding = (name) => [{ check: "clock", level: name === "node-7" ? "warning" : "note", found: "it is not synchronised", advice: "run chrony" }];
const lookup = { device: 0, number: 1, unix_ms: Date.now(), kind: "lookup", request: "long", trace: null, tenant: "a", namespace: "0", chunk_tokens: 16, prompt_tokens: 1, chunks: 10_000, found_chunks: 0, refused: null, runs, other_namespaces: [], hashes: [] };
await page.route("**/status", (route) => route.fulfill({ json: { version: "1", uptime_seconds: 1, epoch: "1.1", follows: false, leader: null, nodes: names.map(member), lost: [] } }));
await page.route("**/console/nodes**", (route) => {
  const path = new URL(route.request().url()).searchParams.get("path");
  const after = (name, most) => Array.from({ length: most }, (_, number) => names[(Number(name.slice(5)) + 1 + number) % 256]);
  const link = (peer) => ({ peer, sent_bytes: 1e9, received_bytes: 1e9, rtt_seconds: 0.001, sent_packets: 1e6, lost_packets: 5 });
  const said = path.startsWith("/lookups") ? (name) => (name === "node-0" ? [lookup] : []) : path === "/links" ? (name) => after(name, 96).map(link) : path === "/doctor" ? finding : node;
  return route.fulfill({ json: names.map((name) => ({ node: name, said: said(name), error: null })) });
});
const longest = async (work) => {
  await page.evaluate(() => {
    window.longest = 0;
    let last = performance.now();
    const frame = (now) => {
      window.longest = Math.max(window.longest, now - last);
      last = now;
      window.framing = requestAnimationFrame(frame);
    };
    window.framing = requestAnimationFrame(frame);
  });
  await work();
  await page.waitForTimeout(5000);
  return page.evaluate(() => (cancelAnimationFrame(window.framing), Math.round(window.longest)));
};
await page.goto(`${address}#cluster`);
const tiles = await longest(() => page.locator("article.tile").nth(255).waitFor());
const rack = page.getByRole("region", { name: "Zone rack-3" });
assert.equal(await rack.locator("article.tile").count(), 64, "a quarter of the nodes is in each zone");
await rack.getByRole("heading", { name: "node-255" }).waitFor();
assert.match(await tile(page, "node-9 ").textContent(), /table 1\.0/, "the table that it goes by is not the coordinator's");
assert.doesNotMatch(await tile(page, "node-10 ").textContent(), /table/);
// The dots: a band of those that have links, and nothing beside it.
const dots = page.getByRole("img", { name: "Links between 256 nodes" });
await dots.scrollIntoViewIfNeeded();
const alpha = (from, to) => dots.evaluate((canvas, [x, y]) => canvas.getContext("2d").getImageData(x, y, 1, 1).data[3], [to, from]);
assert.ok((await alpha(10, 11)) > 100 && (await alpha(10, 106)) > 100, "node-10 has links to the 96 nodes after it");
assert.deepEqual([await alpha(10, 10), await alpha(10, 107)], [0, 0], "and to no others");
await dots.hover({ position: { x: 1, y: 1 } });
const advice = page.getByRole("region", { name: "Advice" });
await advice.getByRole("listitem").filter({ hasText: "node-7: clock: it is not synchronised. Run chrony." }).waitFor();
await advice.getByText("Notes of larder doctor about the hosts: 1").click();
await advice.getByText("node-0, node-1, node-2, node-3, node-4 and 250 more").waitFor();
const chunks = await longest(async () => {
  await page.keyboard.press("2");
  await page.getByRole("button", { name: "long" }).click();
  await page.getByText("9,500 more").waitFor();
});
// Another lookup is explained alone, or its error is shown.
const small = { ...lookup, runs: [{ ...runs[0], to: 1, outcome: "never_stored", tier: null }], chunks: 1 };
const [first, second] = ["first", "second"].map((request, at) => ({ ...small, request, number: at, hashes: [request] }));
await page.route("**/console/nodes**", (route) => {
  const path = new URL(route.request().url()).searchParams.get("path");
  if (path === "/explain" && !route.request().postData().includes("first")) return route.fulfill({ status: 503, body: "it cannot be explained" });
  const said = path === "/explain" ? [{ runs: [{ ...runs[1], from: 0, to: 1 }] }] : [first, second];
  return route.fulfill({ json: [{ node: path === "/explain" ? "node-1" : "node-0", said, error: null }] });
});
await page.getByRole("button", { name: "first", exact: true }).click();
await reasons.getByText(/Evicted by need/).waitFor();
await page.getByRole("button", { name: "second", exact: true }).click();
await reasons.getByText("it cannot be explained").waitFor();
assert.equal(await reasons.getByText(/Evicted by/).count(), 0, "the other lookup's evictions are gone");
say("scale", `longest frame ${tiles} ms with 256 nodes, ${chunks} ms with 10,000 outcomes of a prompt`);
await browser.close();
