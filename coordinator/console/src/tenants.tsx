// Tenants and namespaces: their parts of the nodes, sessions and pins.

import { useState } from "preact/hooks";
import { Purge, Unpin } from "./admin";
import { nodes, type Namespace, type Pin, type Said, type Session, type Tenant, type Usage } from "./api";
import { Prefixes } from "./prefixes";
import { Bar, Table, Trouble, bytes, count, seconds, share, useEvery } from "./show";

const flat = <T,>(said: Said<T[]>[]) => said.flatMap((one) => (one.said ?? []).map((row) => ({ ...row, node: one.node })));

const look = () =>
  Promise.all([
    nodes<Tenant[]>("/tenants"),
    nodes<Namespace[]>("/namespaces"),
    nodes<Session[]>("/sessions"),
    nodes<Pin[]>("/pins"),
    nodes<Usage[]>("/usage"),
  ]);

export function Tenants() {
  const { value, error } = useEvery(3000, look);
  if (!value) return <Trouble text={error} />;
  const [tenants, namespaces, sessions, pins, usage] = value;
  const used = flat(usage);
  const byName = new Map<string, Tenant>();
  for (const row of flat(tenants)) {
    const all = byName.get(row.tenant);
    if (!all) byName.set(row.tenant, { ...row });
    else {
      for (const field of ["sessions", "pins", "pinned_bytes", "arena_bytes", "arena_limit_bytes"] as const) all[field] += row[field];
    }
  }
  const byNamespace = new Map<string, Namespace>();
  for (const row of flat(namespaces)) {
    const all = byNamespace.get(row.fingerprint);
    if (!all) byNamespace.set(row.fingerprint, { ...row });
    else {
      all.sessions += row.sessions;
      all.chunks += row.chunks;
    }
  }
  return (
    <>
      <Trouble text={error} />
      {tenants.map((one) => <Trouble text={one.error && `${one.node}: ${one.error}`} />)}
      <h2>Tenants</h2>
      <div class="tiles">
        {[...byName.values()].map((tenant) => (
          <article class="tile" key={tenant.tenant}>
            <h3>{tenant.tenant}</h3>
            <Bar label="memory" part={tenant.arena_bytes} whole={tenant.arena_limit_bytes} />
            <p>
              {bytes(tenant.arena_bytes)} of memory, {count(tenant.sessions)} sessions, {count(tenant.pins)} pins of{" "}
              {bytes(tenant.pinned_bytes)}
            </p>
            <Saved of={used.filter((one) => one.tenant === tenant.tenant)} />
            <Purge tenant={tenant.tenant} />
          </article>
        ))}
      </div>
      <h2>Namespaces</h2>
      <Table name="Namespaces" heads={["tenant", "model", "fingerprint", "#tokens of a chunk", "#sessions", "#chunks", "#tokens asked", "#hit", "hit by tier", ""]}>
        {[...byNamespace.values()].map((one) => (
          <tr key={one.fingerprint}>
            <td>{one.tenant}</td>
            <td>{one.model}</td>
            <td>
              <code>{one.fingerprint.slice(0, 16)}</code>
            </td>
            <td class="number">{count(one.chunk_tokens)}</td>
            <td class="number">{count(one.sessions)}</td>
            <td class="number">{count(one.chunks)}</td>
            <Hits of={used.filter((row) => one.fingerprint.startsWith(row.namespace) && row.tenant === one.tenant)} />
            <td>
              <Purge namespace={one.fingerprint} />
            </td>
          </tr>
        ))}
      </Table>
      <Prefixes usage={usage} />
      <h2>Sessions</h2>
      <Table name="Sessions" heads={["node", "#device", "#session", "tenant", "client", "#pid", "namespaces", "#leases", "last request"]}>
        {flat(sessions).map((one) => (
          <tr key={`${one.node}/${one.device}/${one.session}`}>
            <td>{one.node}</td>
            <td class="number">{one.device}</td>
            <td class="number">{one.session}</td>
            <td>{one.tenant}</td>
            <td>{one.client}</td>
            <td class="number">{one.pid}</td>
            <td>
              <code>{one.fingerprints.map((fingerprint) => fingerprint.slice(0, 8)).join(" ")}</code>
            </td>
            <td class="number">{count(one.leases)}</td>
            <td>{one.last_request && `${one.last_request}, ${seconds((one.idle_ms ?? 0) / 1000)} ago`}</td>
          </tr>
        ))}
      </Table>
      <h2>Pins</h2>
      <Table name="Pins" heads={["node", "#device", "#pin", "tenant", "#chunks", "#memory", "#left", ""]}>
        {flat(pins).map((one) => (
          <tr key={`${one.node}/${one.device}/${one.pin}`}>
            <td>{one.node}</td>
            <td class="number">{one.device}</td>
            <td class="number">{one.pin}</td>
            <td>{one.tenant}</td>
            <td class="number">{count(one.chunks)}</td>
            <td class="number">{bytes(one.bytes)}</td>
            <td class="number">{seconds(one.seconds_left)}</td>
            <td>
              <Unpin node={one.node} device={one.device} pin={one.pin} />
            </td>
          </tr>
        ))}
      </Table>
    </>
  );
}

/// The price of a GPU that the page remembers.
const storedPrice = () => Number(localStorage.getItem("price_per_gpu_hour")) || 2.5;

/// Seconds of prefill that hits saved, and their price.
function Saved({ of }: { of: Usage[] }) {
  const [price, setPrice] = useState(storedPrice());
  const saved = of.reduce((all, one) => all + one.prefill_seconds_saved, 0);
  return (
    <p>
      {seconds(saved)} of prefill saved{saved > 0 ? "" : " (counted only for engines that report their speed)"}: {((saved / 3600) * price).toFixed(2)} at{" "}
      <input
        type="number"
        class="price"
        min={0}
        step={0.1}
        aria-label="Price of a GPU hour"
        value={price}
        onChange={(event) => {
          localStorage.setItem("price_per_gpu_hour", event.currentTarget.value);
          setPrice(storedPrice());
        }}
      />{" "}
      for a GPU hour
    </p>
  );
}

function Hits({ of }: { of: Usage[] }) {
  const asked = of.reduce((all, one) => all + one.tokens_asked, 0);
  const tiers = new Map<string, number>();
  for (const { tier, tokens } of of.flatMap((one) => one.hits)) tiers.set(tier, (tiers.get(tier) ?? 0) + tokens);
  const hit = [...tiers.values()].reduce((all, tokens) => all + tokens, 0);
  return (
    <>
      <td class="number">{count(asked)}</td>
      <td class="number">{share(hit, asked)}</td>
      <td>{[...tiers].map(([tier, tokens]) => `${tier} ${share(tokens, asked)}`).join(", ")}</td>
    </>
  );
}
