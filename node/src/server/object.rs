//! Opens the object tier when a node starts.

use larder_net::blocking::blocking;

use std::sync::{Arc, Weak};

use crate::hands::ObjectParts;
use crate::http::{HttpState, ObjectStatus};
use crate::limits::ObjectLimits;
use crate::metrics::SharedMetrics;
use crate::object::metrics::Side;
use crate::object::{ObjectOptions, ObjectTier, OpenError};

/// The object tier of a node, which its actors share.
pub(super) struct Objects {
    limits: ObjectLimits,
    /// The tier, or the error of opening it: then the node serves without it.
    tier: Result<Arc<ObjectTier>, OpenError>,
}

impl Objects {
    /// Opens the tier, and lets `state` show it. If the tier cannot be opened, the node logs the reason and serves without it. If
    /// the store does not answer, the tier leaves the store alone and tries again later.
    ///
    /// # Errors
    /// Fails if the tier's metrics are registered already.
    pub(super) async fn start(
        limits: Option<&ObjectLimits>,
        metrics: &SharedMetrics,
        state: &HttpState,
    ) -> Result<Option<Self>, prometheus::Error> {
        let Some(limits) = limits.cloned() else { return Ok(None) };
        let options = limits.options.clone();
        let url = options.url.clone();
        let object_metrics = metrics.add_object_tier()?;
        let of_tier = object_metrics.clone();
        let tier = blocking(move || ObjectTier::open(&options, of_tier)).await;
        match &tier {
            Ok(_) => tracing::info!(url, "the object tier is open"),
            Err(error) => {
                let source = std::error::Error::source(error).map(ToString::to_string);
                tracing::error!(%error, source, "the node serves without its object tier");
                object_metrics.never_opened();
            }
        }
        let objects = Self { limits, tier: tier.map(Arc::new) };
        _ = state.object.set(Box::new(objects.reporter()));
        Ok(Some(objects))
    }

    /// The tier; dangling if it is not open. The reference does not keep the tier open.
    pub(super) fn tier(&self) -> Weak<ObjectTier> {
        self.tier.as_ref().map_or_else(|_| Weak::new(), Arc::downgrade)
    }

    /// The parts that one actor needs; `None` if the tier is not open.
    pub(super) fn parts(&self) -> Option<ObjectParts> {
        let ObjectLimits { known_chunks, options: ObjectOptions { deadline, find_deadline, .. } } =
            self.limits;
        let tier = Arc::clone(self.tier.as_ref().ok()?);
        Some(ObjectParts { tier, deadline, find_deadline, known_chunks })
    }

    /// Reports the state of the store, without keeping the tier open.
    fn reporter(&self) -> impl Fn() -> ObjectStatus + Send + Sync + use<> {
        let ObjectOptions { url, writes, .. } = self.limits.options.clone();
        let tier = self.tier();
        let error = self.tier.as_ref().err().map(ToString::to_string);
        move || match tier.upgrade() {
            Some(tier) => ObjectStatus {
                url: url.clone(),
                reads: !tier.is_closed(Side::Reading),
                writes: writes && !tier.is_closed(Side::Writing),
                trouble: tier.trouble().map(|trouble| trouble.to_string()),
            },
            None => ObjectStatus { url: url.clone(), reads: false, writes: false, trouble: error.clone() },
        }
    }
}
