// Looks at the tile of a node with a disk, in headless Chromium: node fill.mjs CHROMIUM ADDRESS

import assert from "node:assert/strict";
import { chromium } from "playwright-core";

const [executablePath, address] = process.argv.slice(2);
const browser = await chromium.launch({ executablePath, args: ["--no-sandbox"] });
const page = await browser.newPage();
// A slow machine takes long for a page.
page.setDefaultTimeout(120_000);
await page.goto(address);
const tile = page.locator("article.tile").first();
const disk = tile.locator("label.bar", { hasText: /^disk/ });
await disk.waitFor();
const { used_bytes, capacity_bytes } = (await (await page.request.get(`${address}console/nodes?path=/status`)).json())[0].said.actors[0].disk;
const [value, max] = await disk.locator("meter").evaluate((meter) => [meter.value, meter.max]);
assert.equal(max, capacity_bytes);
assert.ok(value > 0 && value <= used_bytes && used_bytes < capacity_bytes, `${value} of ${used_bytes} of ${capacity_bytes}`);
console.log(`${"disk".padEnd(12)} ${(await disk.innerText()).replaceAll(/\s+/g, " ")}`);
await browser.close();
