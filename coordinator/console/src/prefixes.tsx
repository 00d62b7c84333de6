// The hottest prefixes of a node, as a tree of hashes.

import { useEffect, useState } from "preact/hooks";
import { nodes, type HotPrefix, type Said, type Usage } from "./api";
import { Table, Trouble, count, share, useEvery } from "./show";

/// The runs in the order of a tree: each run behind the run that it continues.
function tree(runs: HotPrefix[]) {
  const children = new Map<number | null, number[]>();
  runs.forEach((run, place) => children.set(run.parent, [...(children.get(run.parent) ?? []), place]));
  const rows: { run: HotPrefix; depth: number; place: number }[] = [];
  const visit = (parent: number | null, depth: number) => {
    for (const place of children.get(parent) ?? []) {
      rows.push({ run: runs[place]!, depth, place });
      visit(place, depth + 1);
    }
  };
  visit(null, 0);
  return rows;
}

/// The answering node that was asked for most tokens.
function busiest(usage: Said<Usage[]>[]) {
  const asked = (one: Said<Usage[]>) => (one.said ?? []).reduce((all, row) => all + row.tokens_asked, 0);
  const answering = usage.filter((one) => one.said).sort((a, b) => asked(b) - asked(a));
  return { name: answering[0]?.node ?? usage[0]?.node ?? "", isAsked: answering[0] !== undefined && asked(answering[0]) > 0 };
}

export function Prefixes({ usage }: { usage: Said<Usage[]>[] }) {
  const [chosen, setChosen] = useState("");
  const isChosen = usage.some((one) => one.node === chosen);
  const first = busiest(usage);
  const node = isChosen ? chosen : first.name;
  // The node is kept once there is something to show. Otherwise the table would change nodes while somebody reads it.
  useEffect(() => {
    if (!isChosen && first.isAsked) setChosen(first.name);
  });
  const { value, error } = useEvery(10000, () => nodes<HotPrefix[]>("/prefixes", undefined, node), [node]);
  const one = value?.find((said) => said.node === node);
  const runs = one?.said ?? [];
  return (
    <>
      <h2>Hottest prefixes</h2>
      <div class="fields">
        <label>
          Node
          <select value={node} onChange={(event) => setChosen(event.currentTarget.value)}>
            {usage.map(({ node: name }) => (
              <option key={name}>{name}</option>
            ))}
          </select>
        </label>
      </div>
      <Trouble text={error ?? one?.error} />
      {one?.said && runs.length === 0 && <p>No prompts with a common beginning are among the last lookups of {node}.</p>}
      {runs.length > 0 && (
        <Table name="Prefixes" heads={["first chunk", "namespace", "#chunks", "#tokens", "#lookups", "#found"]}>
          {tree(runs).map(({ run, depth, place }) => (
            <tr key={place}>
              <td>
                {"\u2003".repeat(Math.min(depth, 12))}
                <code>{run.first_chunk}</code>
              </td>
              <td>
                <code>{run.namespace.slice(0, 8)}</code>
              </td>
              <td class="number">
                {count(run.from)} to {count(run.to - 1)}
              </td>
              <td class="number">{count(run.tokens)}</td>
              <td class="number">{count(run.lookups)}</td>
              <td class="number">{share(run.hits, run.lookups)}</td>
            </tr>
          ))}
        </Table>
      )}
    </>
  );
}
