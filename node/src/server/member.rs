//! The node as a member of its cluster, from its start until it leaves.

use std::net::SocketAddr;
use std::sync::Arc;

use actix::Addr;
use futures_util::FutureExt as _;
use larder_net::audit::Audit;
use larder_protocol::peer::Show;

use super::ServeError;
use crate::actor::GpuActor;
use crate::clock::Clock;
use crate::cluster::Cluster;
use crate::drain::{Drains, Ended};
use crate::exchange::ShowNode;
use crate::http::HttpState;
use crate::limits::Limits;
use crate::metrics::Metrics;
use crate::purge::Purges;
use crate::reload::Reloads;

/// Starts the parts that a member of a cluster needs, if the node is to be a member.
pub(super) async fn start_cluster(
    limits: &Limits,
    metrics: &Metrics,
    clock: Clock,
) -> Result<Option<Cluster>, ServeError> {
    let Some(cluster) = &limits.cluster else { return Ok(None) };
    Ok(Some(Cluster::start(cluster, limits.sampler, &limits.name, metrics.registry(), clock).await?))
}

/// Joins the cluster, if there is one. Returns the node's drain.
pub(super) async fn join_cluster(
    cluster: Option<&mut Cluster>,
    limits: &Limits,
    actors: &[Addr<GpuActor>],
    http: SocketAddr,
    (reloads, purges, state): (&Reloads, &Purges, &Arc<HttpState>),
) -> Option<Drains> {
    let (cluster, cluster_limits) = (cluster?, limits.cluster.as_ref()?);
    let drains = Drains::new(
        state.clock,
        cluster_limits.drain,
        cluster_limits.drain_bytes_per_second,
        cluster.known(),
    );
    _ = state.drains.set(drains.clone());
    _ = state.cluster.set(Box::new(cluster.reporter()));
    let arena_bytes: u64 = limits.actors.iter().map(|actor| actor.arena.bytes()).sum();
    let shown = Arc::clone(state);
    let show: ShowNode = Box::new(move |Show { path, body }| {
        let state = Arc::clone(&shown);
        async move { state.show_peer(&path, &body).await }.boxed_local()
    });
    let by_admins = (reloads, purges, show);
    cluster.join(actors, http, state.incarnation, arena_bytes / WEIGHT_BYTES, &drains, by_admins).await;
    Some(drains)
}

/// Waits until the node is to leave: after it was told to stop and the drain before a stop is over, or after a drain that
/// somebody asked for.
pub(super) async fn to_leave(
    stop: impl Future<Output = ()>,
    drains: Option<&Drains>,
    actors: &[Addr<GpuActor>],
    audit: &Audit,
) -> Ended {
    let Some(drains) = drains else {
        stop.await;
        return Ended::Stopped;
    };
    let drained = drains.carry_out(actors);
    tokio::pin!(drained);
    tokio::select! {
        () = stop => {
            let within = drains.at_stop();
            if within.is_zero() {
                return Ended::Stopped;
            }
            audit.note("a signal", "drain", &format!("within {} ms", within.as_millis()), Ok::<_, &str>(()));
            tracing::info!(?within, "the node drains before it stops");
            drains.stop_within(within);
            drained.await
        }
        ended = &mut drained => ended,
    }
}

/// The unit of a node's weight in the ring, in bytes of its arena.
const WEIGHT_BYTES: u64 = 1 << 20;
