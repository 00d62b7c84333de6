// Cluster: a tile for each node, by zone.

import { useMemo } from "preact/hooks";
import { nodes, status, type CoordinatorStatus, type Member, type NodeStatus, type Said } from "./api";
import { DrainNode, ForgetNode, Policy } from "./admin";
import { Advice } from "./advice";
import { Hour } from "./hour";
import { Links } from "./links";
import { Bar, Table, Trouble, bytes, count, seconds, useEvery, useMore } from "./show";

async function look(): Promise<{ cluster: CoordinatorStatus; said: Said<NodeStatus>[] }> {
  const [cluster, said] = await Promise.all([status(), nodes<NodeStatus>("/status")]);
  return { cluster, said };
}

export function Cluster() {
  const { value, error } = useEvery(2000, look);
  if (!value) return <Trouble text={error} />;
  const { cluster, said } = value;
  return (
    <>
      <Trouble text={error} />
      <p>
        {count(cluster.nodes.length)} nodes, table {cluster.epoch}, coordinator {cluster.version}, up {seconds(cluster.uptime_seconds)}
        {cluster.follows ? `. This coordinator follows${cluster.leader ? ` ${cluster.leader}` : ""}.` : "."}
      </p>
      <Hour />
      <Policy />
      {cluster.lost.length > 0 && (
        <Table name="Lost nodes" heads={["lost node", "address", "last heard", ""]}>
          {cluster.lost.map((lost) => (
            <tr key={lost.name} class="bad">
              <td>{lost.name}</td>
              <td>{lost.http}</td>
              <td>{seconds(lost.silent_seconds)} ago</td>
              <td>
                <ForgetNode node={lost.name} />
              </td>
            </tr>
          ))}
        </Table>
      )}
      <Zones {...{ cluster, said }} />
      <Advice {...{ cluster, said }} />
      {LINKS}
    </>
  );
}

/// Made once, since the page draws itself more often than the links change.
const LINKS = <Links />;

const NO_ZONE = "";

/// The last known zone of each node, for when the node is silent.
const zones = new Map<string, string>();

function Zones({ cluster, said }: { cluster: CoordinatorStatus; said: Said<NodeStatus>[] }) {
  const byName = new Map(said.map((one) => [one.node, one]));
  const byZone = new Map<string, Member[]>();
  for (const member of cluster.nodes) {
    const node = byName.get(member.name)?.said;
    if (node) zones.set(member.name, node.cluster?.zone ?? NO_ZONE);
    const zone = zones.get(member.name) ?? NO_ZONE;
    byZone.set(zone, [...(byZone.get(zone) ?? []), member]);
  }
  let more = useMore(cluster.nodes.length);
  return (
    <>
      {[...byZone].sort(([a], [b]) => a.localeCompare(b, "en", { numeric: true })).map(([zone, members]) => {
        const shown = members.slice(0, Math.max(0, more));
        more -= members.length;
        const tiles = (
          <div class="tiles">
            {shown.map((member) => (
              <Tile key={member.name} member={member} one={byName.get(member.name)} epoch={cluster.epoch} />
            ))}
          </div>
        );
        if (byZone.size === 1 && zone === NO_ZONE) return tiles;
        const name = zone === NO_ZONE ? "No zone" : `Zone ${zone}`;
        return (
          <section key={zone} aria-label={name}>
            <h2>
              {name} <small>{count(members.length)} nodes</small>
            </h2>
            {tiles}
          </section>
        );
      })}
    </>
  );
}

function Tile({ member, one, epoch }: { member: Member; one: Said<NodeStatus> | undefined; epoch: string }) {
  const draw = () => {
    const node = one?.said;
    const state = node?.drain ? "draining" : one?.error ? "silent" : node && !node.ready ? "not ready" : member.state;
    const actors = node?.actors ?? [];
    const sum = (of: (actor: (typeof actors)[0]) => number) => actors.reduce((all, actor) => all + of(actor), 0);
    const differs = node?.cluster && node.cluster.epoch !== epoch;
    return (
      <article class={state === "alive" ? "tile" : "tile bad"}>
        <h3>
          {member.name} <small>{state}</small>
        </h3>
        <p>
          {node ? `version ${node.version}, ` : ""}last heard {seconds(member.silent_seconds)} ago
          {differs ? `, table ${node.cluster?.epoch}` : ""}
        </p>
        {one?.error && <Trouble text={one.error} />}
        {node && (
          <>
            <Bar label="memory" part={sum((a) => a.used_bytes)} whole={sum((a) => a.arena_bytes)} />
            {actors.some((a) => a.disk) && (
              <Bar label="disk" part={sum((a) => a.disk?.used_bytes ?? 0)} whole={sum((a) => a.disk?.capacity_bytes ?? 0)} />
            )}
            <Bar label="hits" part={sum((a) => a.tokens_hit)} whole={sum((a) => a.tokens_asked)} />
            <p>
              {count(sum((a) => a.chunks))} chunks of {bytes(sum((a) => a.arena_bytes))},{" "}
              {actors.some((a) => a.disk) ? `${count(sum((a) => a.disk?.chunks ?? 0))} on disk, ` : ""}
              {count(sum((a) => a.evictions))} evicted, {count(sum((a) => a.sessions))} sessions, {actors[0]?.policy}
            </p>
            <DrainNode node={member.name} drains={node.drain !== null} />
            {actors.map((a) => <Trouble text={a.disk_trouble} />)}
            {node.cluster?.silent.length ? <Trouble text={`no answer from ${node.cluster.silent.join(", ")}`} /> : null}
          </>
        )}
      </article>
    );
  };
  return useMemo(draw, [member, one, epoch]);
}
