// What if: the last lookups, played again by each node through caches of other sizes and policies.

import { nodes, type Said, type Tried, type WhatIf } from "./api";
import { Table, Trouble, bytes, count, seconds, share, useEvery } from "./show";

interface Sum extends Tried {
  bytes: number;
}

/// What all nodes say of one cache; the present one has the policy in force and once the size.
function sums(said: Said<WhatIf>[]) {
  const byVariant = new Map<string, Sum>();
  for (const played of said.flatMap((one) => one.said?.played ?? [])) {
    for (const tried of played.tried) {
      const key = `${tried.policy} ${tried.times}`;
      const all = byVariant.get(key) ?? { ...tried, capacity_chunks: 0, tokens_hit: 0, bytes: 0 };
      all.capacity_chunks += tried.capacity_chunks;
      all.tokens_hit += tried.tokens_hit;
      all.bytes += tried.capacity_chunks * played.chunk_bytes;
      byVariant.set(key, all);
    }
  }
  return [...byVariant.values()];
}

const points = (part: number, present: number, whole: number) => {
  const difference = (100 * (part - present)) / Math.max(1, whole);
  return Math.abs(difference) < 0.05 ? "" : `${difference > 0 ? "+" : "−"}${Math.abs(difference).toFixed(1)}`;
};

function Rows({ rows, present, asked, head, name }: { rows: Sum[]; present: Sum; asked: number; head: (row: Sum) => string; name: string }) {
  return (
    <Table name={name} heads={[name === "Sizes" ? "size" : "policy", "#chunks", "#memory and disk", "tokens hit", "", "#points"]}>
      {rows.map((row) => (
        <tr key={`${row.policy} ${row.times}`} class={row === present ? "present" : ""}>
          <td>{head(row)}</td>
          <td class="number">{count(row.capacity_chunks)}</td>
          <td class="number">{bytes(row.bytes)}</td>
          <td>
            <meter min={0} max={asked || 1} value={row.tokens_hit} aria-label="tokens hit" />
          </td>
          <td class="number">{share(row.tokens_hit, asked)}</td>
          <td class="number">{points(row.tokens_hit, present.tokens_hit, asked)}</td>
        </tr>
      ))}
    </Table>
  );
}

export function WhatIfPage() {
  const { value, error } = useEvery(4000, () => nodes<WhatIf>("/what_if"));
  if (!value) return <Trouble text={error} />;
  const played = value.flatMap((one) => one.said?.played ?? []);
  const sum = (of: (one: (typeof played)[0]) => number) => played.reduce((all, one) => all + of(one), 0);
  const all = sums(value);
  // Where nodes differ in their policy, each row says which nodes' it is.
  const policies = [...new Set(played.map((one) => one.policy))];
  const present = all.find((row) => row.policy === policies[0] && row.times === 1);
  const asked = sum((one) => one.tokens_asked);
  return (
    <>
      <Trouble text={error} />
      {value.map((one) => <Trouble text={one.error && `${one.node}: ${one.error}`} />)}
      {value.some((one) => one.said?.running) && <p>Lookups are being played.</p>}
      {!present ? (
        <p>Nothing has been looked up and cached that could be played.</p>
      ) : policies.length > 1 ? (
        <p>The nodes evict by different policies ({policies.join(", ")}): set one on all of them to compare.</p>
      ) : (
        <>
          <p>
            The last lookups, played again through the store of {played.length === 1 ? "one node" : `each of ${count(played.length)} nodes`}: {count(sum((one) => one.warming_lookups))} fill
            it, then {count(sum((one) => one.counted_lookups))} are counted, of {seconds(Math.max(...played.map((one) => one.counted_seconds)))}.
            Chunks on disk count as chunks in memory, and nodes do not read each other's.{" "}
            {share(sum((one) => one.tokens_found), asked)} of the tokens were found in truth, at other nodes, too.
          </p>
          {sum((one) => one.left_out_lookups) > 0 && (
            <p>{count(sum((one) => one.left_out_lookups))} lookups are left out: of chunks of another size, or that contradict others.</p>
          )}
          <h2>More memory or disk</h2>
          <Rows
            name="Sizes"
            rows={all.filter((row) => row.policy === present.policy)}
            head={(row) => (row.times === null ? "never evicts" : row.times === 1 ? "as it is" : `${row.times} times`)}
            {...{ present, asked }}
          />
          <h2>Another policy</h2>
          <Rows
            name="Policies"
            rows={all.filter((row) => row.times === 1).sort((a, b) => b.tokens_hit - a.tokens_hit)}
            head={(row) => (row === present ? `${row.policy}, as it is` : row.policy)}
            {...{ present, asked }}
          />
        </>
      )}
    </>
  );
}
