// Why was this a miss?

import { useState } from "preact/hooks";
import { nodes, type Chain, type Lookup, type Run } from "./api";
import { Table, Trouble, ago, count, seconds, share, useEvery, useMore } from "./show";

type Found = Lookup & { node: string };

const MEANING: Record<string, string> = {
  found: "The chunk was there.",
  behind_gap: "The chunk was there, but a chunk before it is missing.",
  computed_faster: "The chunk was there; the engine computes it sooner than it comes.",
  not_asked: "At least one token is left to compute, or the engine cannot use a hit.",
  being_written: "Another request was computing the chunk at that moment.",
  evicted: "The chunk was here before.",
  never_stored: "No eviction of the chunk is known: the prompt differs, or no engine saved the chunk.",
  unknown: "The chunk is not here, and older evictions are forgotten.",
  home_silent: "The home of the chunk's directory rows did not answer.",
  peer_silent: "The chunk's holder did not answer.",
  deadline: "The chunk did not come before the deadline.",
  busy: "The chunk's holder, or this node, had too much to do.",
  not_held: "The holder no longer had the chunk.",
  broken: "The connection to the holder broke.",
  damaged: "The chunk's bytes were wrong.",
  unreadable: "The tier could not read the chunk.",
  refused: "The request was refused.",
};

const isMiss = (run: Run) => run.outcome !== "found" && run.outcome !== "not_asked";

function summary(runs: Run[]): string {
  const counts = new Map<string, number>();
  for (const run of runs.filter(isMiss)) counts.set(run.outcome, (counts.get(run.outcome) ?? 0) + run.to - run.from);
  return [...counts].sort((a, b) => b[1] - a[1]).map(([name, chunks]) => `${name} ${count(chunks)}`).join(", ");
}

export function Why() {
  const [tenant, setTenant] = useState("");
  const [request, setRequest] = useState("");
  const [wanted, setWanted] = useState("");
  const [chosen, setChosen] = useState<Found | null>(null);
  const list = async () => {
    const queries = wanted
      ? [`/lookups?most=20&request=${encodeURIComponent(wanted)}`].concat(
          /^[0-9a-f]{32}$/.test(wanted) ? [`/lookups?most=20&trace=${wanted}`] : [],
        )
      : [`/lookups?misses=1&most=50${tenant ? `&tenant=${encodeURIComponent(tenant)}` : ""}`];
    const answers = (await Promise.all(queries.map((query) => nodes<Lookup[]>(query)))).flat();
    const found = answers.flatMap((one) => (one.said ?? []).map((lookup) => ({ ...lookup, node: one.node })));
    found.sort((a, b) => b.unix_ms - a.unix_ms);
    const silent = answers.filter((one) => one.error).map((one) => `${one.node}: ${one.error}`);
    return { found: found.slice(0, 100), silent };
  };
  const { value, error } = useEvery(3000, list, [tenant, wanted]);
  return (
    <>
      <form
        class="fields"
        onSubmit={(event) => {
          event.preventDefault();
          setWanted(request.trim());
        }}
      >
        <label>
          Request or trace id
          <input name="request" value={request} onInput={(event) => setRequest(event.currentTarget.value)} />
        </label>
        <label>
          Tenant
          <input name="tenant" value={tenant} onChange={(event) => setTenant(event.currentTarget.value.trim())} />
        </label>
        <button>Find</button>
      </form>
      <Trouble text={error} />
      {value?.silent.map((text) => <Trouble text={text} />)}
      {chosen && <Explained lookup={chosen} close={() => setChosen(null)} />}
      <h2>{wanted ? `Lookups of ${wanted}` : "Last lookups with a miss"}</h2>
      {value && value.found.length === 0 && <p>No such lookup is known. Nodes keep about the last thousand lookups.</p>}
      <Table name="Lookups" heads={["ago", "request", "tenant", "node", "kind", "#chunks", "#found", "misses"]}>
        {value?.found.map((lookup) => (
          <tr key={`${lookup.node}/${lookup.device}/${lookup.number}`}>
            <td>{ago(lookup.unix_ms)}</td>
            <td>
              <button class="link" onClick={() => setChosen(lookup)}>
                {lookup.request ?? lookup.trace ?? `lookup ${lookup.number}`}
              </button>
            </td>
            <td>{lookup.tenant}</td>
            <td>{lookup.node}</td>
            <td>{lookup.kind}</td>
            <td class="number">{count(lookup.chunks)}</td>
            <td class="number">{share(lookup.found_chunks, lookup.chunks)}</td>
            <td>{summary(lookup.runs)}</td>
          </tr>
        ))}
      </Table>
    </>
  );
}

function Explained({ lookup, close }: { lookup: Found; close: () => void }) {
  const open = (run: Run) => run.outcome === "never_stored" || run.outcome === "unknown";
  // Another node may have had what this node never had. The list has no hashes, so they are asked for by the request's name.
  const others = async () => {
    if (!lookup.runs.some(open) || !(lookup.request ?? lookup.trace)) return [];
    const by = lookup.request ? `request=${encodeURIComponent(lookup.request)}` : `trace=${lookup.trace}`;
    const again = await nodes<Lookup[]>(`/lookups?most=20&${by}`, undefined, lookup.node);
    if (again[0]?.error) throw new Error(`${lookup.node}: ${again[0].error}`);
    const whole = again[0]?.said?.find((one) => one.number === lookup.number && one.device === lookup.device);
    if (!whole) return [];
    const said = await nodes<Chain[]>("/explain", { fingerprint: lookup.namespace, hashes: whole.hashes });
    const found = said
      .filter((one) => one.node !== lookup.node)
      .flatMap((one) => (one.said ?? []).flatMap((chain) => chain.runs.map((run) => ({ ...run, node: one.node }))))
      .filter((run) => run.evicted && run.evicted.unix_ms <= lookup.unix_ms)
      .filter((run) => lookup.runs.some((mine) => open(mine) && run.from < mine.to && mine.from < run.to));
    const silent = said.find((one) => one.error);
    if (found.length === 0 && silent) throw new Error(`${silent.node}: ${silent.error}`);
    return found;
  };
  const { value, error } = useEvery(60000, others, [lookup]);
  return (
    <section class="tile" aria-label="Why was this a miss?">
      <h2>
        {lookup.request ?? lookup.trace ?? `lookup ${lookup.number}`}{" "}
        <button onClick={close} aria-label="Close">
          Close
        </button>
      </h2>
      <p>
        {lookup.kind} of tenant {lookup.tenant} at {lookup.node}, device {lookup.device}, {ago(lookup.unix_ms)} ago:{" "}
        {count(lookup.found_chunks)} of {count(lookup.chunks)} chunks of {count(lookup.chunk_tokens)} tokens each could be used.
        {lookup.trace ? ` Trace ${lookup.trace}.` : ""}
      </p>
      <Trouble text={lookup.refused} />
      <Trouble text={error} />
      <Runs runs={[...lookup.runs.map((run) => ({ ...run, node: lookup.node })), ...(value ?? [])]} at={lookup.unix_ms} />
      {lookup.other_namespaces.map((other) => (
        <p key={other.fingerprint}>
          Namespace {other.fingerprint.slice(0, 16)} ({other.model}) has {count(other.chunks)} chunks of this tenant
          {other.has_chunk === null ? "" : other.has_chunk ? " and the missing chunk" : " and lacks this chunk"}; it differs in{" "}
          {other.differing.join(", ")}.
        </p>
      ))}
    </section>
  );
}

/// More rows help nobody, and take a browser too long.
const MOST_RUNS = 500;

export function Runs({ runs, at }: { runs: (Run & { node: string })[]; at: number }) {
  const more = useMore(Math.min(runs.length, MOST_RUNS));
  return (
    <Table name="Chunks" heads={["chunks", "outcome", "node", "tier", "why"]}>
      {runs.slice(0, Math.min(more, MOST_RUNS)).map((run) => (
        <tr key={`${run.node}/${run.from}/${run.outcome}`} class={isMiss(run) ? "bad" : ""}>
          <td>{run.to - run.from === 1 ? run.from : `${run.from} to ${run.to - 1}`}</td>
          <td>{run.outcome}</td>
          <td>{run.node}</td>
          <td>{run.tier}</td>
          <td>
            {MEANING[run.outcome]}{" "}
            {run.evicted &&
              `Evicted by ${run.evicted.rule}, ${seconds((at - run.evicted.unix_ms) / 1000)} before, worth ${count(Math.round(run.evicted.worth))}.`}
          </td>
        </tr>
      ))}
      {runs.length > MOST_RUNS && (
        <tr>
          <td colSpan={5}>{count(runs.length - MOST_RUNS)} more</td>
        </tr>
      )}
    </Table>
  );
}
