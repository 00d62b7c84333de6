// Prompt explorer: which chunks of a prompt exist, where, and what a lookup would return.

import { useState } from "preact/hooks";
import { PinChunks, Purge } from "./admin";
import { nodes, prefix, tokens, type Chain, type Lookup, type Namespace, type Prefix, type Said, type Stay } from "./api";
import { Runs } from "./why";
import { Table, Trouble, count, seconds, useEvery, useMore } from "./show";

interface Result {
  asked: string;
  /// Tokens of a text; null for everything else.
  tokens: number | null;
  prefix: Prefix;
  chains: Said<Chain[]>[];
  fingerprint: string;
  hashes: string[];
}

function numbers(text: string): number[] {
  const list = text.split(/[\s,[\]]+/).filter((word) => word).map(Number);
  if (list.length === 0 || list.some((number) => !Number.isInteger(number) || number < 0)) {
    throw new Error("write token ids: numbers with spaces or commas between them");
  }
  return list;
}

/// The kind of the text in the field: ids, or the prompt itself with or without the model's first tokens.
const KINDS = { ids: "ids", text: "text, after the model's first tokens", bare: "text alone" };

type Kind = keyof typeof KINDS;

async function explore(namespace: Namespace, text: string, kind: Kind): Promise<Result> {
  const body: Record<string, unknown> = { fingerprint: namespace.fingerprint, chunk_tokens: namespace.chunk_tokens, with_hashes: true };
  let hashes: string[] = [];
  let ofText: number | null = null;
  if (kind !== "ids") {
    if (!namespace.hash) throw new Error("only engines hash the chunks of this namespace: paste chunk hashes or a request id");
    const found = (await tokens(namespace.model, text, kind === "bare")).tokens;
    ofText = found.length;
    Object.assign(body, { tokens: found, hash: namespace.hash });
  } else if (/^\s*\[?\s*"?[0-9a-f]{64}/.test(text)) {
    hashes = text.match(/[0-9a-f]{64}/g) ?? [];
    body.hashes = hashes;
  } else if (/^[\s\d,[\]]+$/.test(text)) {
    body.tokens = numbers(text);
    if (!namespace.hash) throw new Error("only engines hash the chunks of this namespace: paste chunk hashes or a request id");
    body.hash = namespace.hash;
  } else {
    const said = await nodes<Lookup[]>(`/lookups?most=5&request=${encodeURIComponent(text.trim())}`);
    const lookup = said.flatMap((one) => one.said ?? []).sort((a, b) => b.unix_ms - a.unix_ms)[0];
    if (!lookup) throw new Error("no node knows this request; for the text of a prompt, choose text as the kind of input");
    hashes = lookup.hashes;
    Object.assign(body, { fingerprint: lookup.namespace, chunk_tokens: lookup.chunk_tokens, hashes });
  }
  const answer = await prefix(body);
  // The coordinator hashes tokens.
  hashes = answer.hashes ?? hashes;
  const fingerprint = body.fingerprint as string;
  const chains = hashes.length ? await nodes<Chain[]>("/explain", { fingerprint, hashes }) : [];
  const asked = text.trim();
  return { asked: asked.length > 40 ? `${asked.slice(0, 40)}…` : asked, tokens: ofText, prefix: answer, chains, fingerprint, hashes };
}

export function Prompt() {
  const { value, error } = useEvery(30000, () => nodes<Namespace[]>("/namespaces"));
  const known = new Map((value ?? []).flatMap((one) => one.said ?? []).map((one) => [one.fingerprint, one]));
  const [fingerprint, setFingerprint] = useState("");
  const [text, setText] = useState("");
  const [kind, setKind] = useState<Kind>("ids");
  const [result, setResult] = useState<Result | null>(null);
  const [trouble, setTrouble] = useState("");
  const namespace = known.get(fingerprint) ?? [...known.values()][0];
  const submit = async (event: Event) => {
    event.preventDefault();
    if (!namespace) return;
    try {
      setResult(await explore(namespace, text, kind));
      setTrouble("");
    } catch (error) {
      setTrouble((error as Error).message);
    }
  };
  return (
    <>
      <Trouble text={error} />
      <form class="fields" onSubmit={submit}>
        <label>
          Namespace
          <select value={namespace?.fingerprint} onChange={(event) => setFingerprint(event.currentTarget.value)}>
            {[...known.values()].map((one) => (
              <option key={one.fingerprint} value={one.fingerprint}>
                {one.tenant}: {one.model} ({one.fingerprint.slice(0, 8)})
              </option>
            ))}
          </select>
        </label>
        <label>
          Kind of input
          <select name="kind" value={kind} onChange={(event) => setKind(event.currentTarget.value as Kind)}>
            {Object.entries(KINDS).map(([key, name]) => (
              <option key={key} value={key}>
                {name}
              </option>
            ))}
          </select>
        </label>
        <label class="wide">
          {kind === "ids" ? "Token ids, chunk hashes, or a request id" : "The prompt's text, as the engine gets it"}
          <textarea name="prompt" rows={4} value={text} onInput={(event) => setText(event.currentTarget.value)} />
        </label>
        <button disabled={!namespace}>Look up</button>
      </form>
      <Trouble text={trouble} />
      {result && (
        <section aria-label={`Chunks of ${result.asked}`}>
          <h2>Chunks of {result.asked}</h2>
          <p>
            {result.tokens === null ? "" : `The text has ${count(result.tokens)} tokens. `}
            All nodes together hold {count(result.prefix.cluster.chunks)} of {count(result.hashes.length)} chunks from the first on (
            {count(result.prefix.cluster.tokens)} tokens).
            {result.prefix.silent_homes.length ? ` ${result.prefix.silent_homes.join(", ")} did not answer: more may be held.` : ""}
          </p>
          {result.hashes.length > 0 && (
            <div class="fields">
              <PinChunks fingerprint={result.fingerprint} hashes={result.hashes} />
              <Purge namespace={result.fingerprint} hashes={result.hashes} />
            </div>
          )}
          <p>
            {result.prefix.cluster.tokens > 0
              ? `A lookup at any node returns ${count(result.prefix.cluster.tokens)} tokens as a hit, from its own chunks and those of other nodes.`
              : "A lookup returns no hit: the engine computes the whole prompt."}{" "}
            The cost of a request at a node, in tokens of prefill, is the node's backlog, the tokens of these chunks that are left to compute, and a tenth of the tokens that come from other nodes.
          </p>
          <Table name="Holders" heads={["node", "#own chunks", "#own tokens", "#cost in tokens"]}>
            {result.prefix.nodes.map((node) => (
              <tr key={node.name}>
                <td>{node.name}</td>
                <td class="number">{count(node.chunks)}</td>
                <td class="number">{count(node.tokens)}</td>
                <td class="number">{count(node.cost_tokens)}</td>
              </tr>
            ))}
          </Table>
          <Stays chains={result.chains} />
          {result.chains.length > 0 && (
            <Runs
              at={Date.now()}
              runs={result.chains.flatMap((one) =>
                (one.said ?? []).flatMap((chain) => chain.runs.map((run) => ({ ...run, node: one.node }))),
              )}
            />
          )}
        </section>
      )}
    </>
  );
}

function until(stay: Stay, evictedAfter: number | null | undefined): string {
  if (stay.keeper === "pin") return `Pinned for another ${seconds(stay.pin_seconds_left ?? 0)}; after that no time is promised.`;
  if (stay.keeper === "use") return "Until its readers and writers are done; after that no time is promised.";
  const lately = evictedAfter == null ? "nothing was evicted yet" : `lately, chunks were evicted ${seconds(evictedAfter)} after their last use`;
  const promised = stay.keeper === "continuation" ? "At least as long as the next chunk; no time is promised" : "No time is promised";
  return `${promised}: last used ${seconds(stay.idle_seconds)} ago; ${lately}.`;
}

/// Table of how long chunks stay in memory.
function Stays({ chains }: { chains: Said<Chain[]>[] }) {
  const rows = chains.flatMap((one) =>
    (one.said ?? []).flatMap((chain) =>
      (chain.stays ?? []).map((stay) => ({ stay, node: one.node, device: chain.device, until: until(stay, chain.evicted_after_seconds) })),
    ),
  );
  const more = useMore(Math.min(rows.length, MOST_STAYS));
  if (rows.length === 0) return null;
  return (
    <Table name="Stays" heads={["chunks in memory", "node", "until when"]}>
      {rows.slice(0, Math.min(more, MOST_STAYS)).map(({ stay, node, device, until }) => (
        <tr key={`${node}/${device}/${stay.from}`}>
          <td>{stay.to - stay.from === 1 ? stay.from : `${stay.from} to ${stay.to - 1}`}</td>
          <td>{node}</td>
          <td>{until}</td>
        </tr>
      ))}
      {rows.length > MOST_STAYS && (
        <tr>
          <td colSpan={3}>{count(rows.length - MOST_STAYS)} more</td>
        </tr>
      )}
    </Table>
  );
}

const MOST_STAYS = 200;
