//! The regions and tensors that a device knows, and their users; the same for every device.

use std::collections::BTreeMap;

use crate::device::DeviceError;
use crate::layout::PagedLayout;
use crate::order::{Order, Places, RegionId, TensorsId, Work};

/// A device's record of a region.
pub(crate) trait Region {
    fn bytes(&self) -> u64;
    fn is_writable(&self) -> bool;
    fn is_host(&self) -> bool;
}

/// Regions `R`, and tensors with a device's records `T` of them.
pub(crate) struct Registry<R, T> {
    regions: BTreeMap<RegionId, Used<R>>,
    tensors: BTreeMap<TensorsId, Used<Tensors<T>>>,
    next: u32,
}

pub(crate) struct Tensors<T> {
    pub(crate) layout: PagedLayout,
    pub(crate) regions: Vec<RegionId>,
    pub(crate) own: T,
}

struct Used<V> {
    value: V,
    users: u32,
}

impl<R: Region, T> Registry<R, T> {
    pub(crate) fn new() -> Self {
        Self { regions: BTreeMap::new(), tensors: BTreeMap::new(), next: 0 }
    }

    pub(crate) fn add_region(&mut self, region: R) -> RegionId {
        let id = RegionId(self.number());
        self.regions.insert(id, Used { value: region, users: 0 });
        id
    }

    pub(crate) fn remove_region(&mut self, id: RegionId) -> Result<R, DeviceError> {
        free(self.regions.get(&id))?;
        self.regions.remove(&id).map(|used| used.value).ok_or(DeviceError::Unknown)
    }

    /// Takes all regions out, when the device has ended.
    pub(crate) fn take_regions(&mut self) -> impl Iterator<Item = R> + use<R, T> {
        std::mem::take(&mut self.regions).into_values().map(|used| used.value)
    }

    /// Checks the layout against the regions it will have.
    pub(crate) fn check_tensors(
        &self,
        layout: &PagedLayout,
        regions: &[RegionId],
    ) -> Result<(), DeviceError> {
        let bytes = regions.iter().map(|&id| {
            let region = self.regions.get(&id).ok_or(DeviceError::Unknown)?;
            Ok(if region.value.is_writable() { region.value.bytes() } else { 0 })
        });
        PagedLayout::new(layout.spec().clone(), &bytes.collect::<Result<Vec<_>, DeviceError>>()?)?;
        Ok(())
    }

    pub(crate) fn add_tensors(&mut self, layout: PagedLayout, regions: Vec<RegionId>, own: T) -> TensorsId {
        for region in &regions {
            self.use_region(*region, true);
        }
        let id = TensorsId(self.number());
        self.tensors.insert(id, Used { value: Tensors { layout, regions, own }, users: 0 });
        id
    }

    pub(crate) fn remove_tensors(&mut self, id: TensorsId) -> Result<T, DeviceError> {
        free(self.tensors.get(&id))?;
        let Used { value, .. } = self.tensors.remove(&id).ok_or(DeviceError::Unknown)?;
        for region in &value.regions {
            self.use_region(*region, false);
        }
        Ok(value.own)
    }

    /// Checks an order, and keeps all that it uses until [`Registry::end`].
    pub(crate) fn begin(&mut self, order: &Order) -> Result<(), DeviceError> {
        order.check(self)?;
        self.count(order, true);
        Ok(())
    }

    pub(crate) fn end(&mut self, order: &Order) {
        self.count(order, false);
    }

    /// The region of a checked order.
    ///
    /// # Panics
    /// Panics if there is none.
    pub(crate) fn region_of(&self, id: RegionId) -> &R {
        &self.regions.get(&id).expect("an order keeps its regions").value
    }

    /// The tensors of a checked order.
    ///
    /// # Panics
    /// Panics if there are none.
    pub(crate) fn tensors_of(&self, id: TensorsId) -> &Tensors<T> {
        &self.tensors.get(&id).expect("an order keeps its tensors").value
    }

    fn count(&mut self, order: &Order, begins: bool) {
        for flag in [order.after, order.then].into_iter().flatten() {
            self.use_region(flag.word.region, begins);
        }
        match &order.work {
            Work::Pages { tensors, pages, .. } => {
                if let Some(used) = self.tensors.get_mut(tensors) {
                    used.count(begins);
                }
                for copy in pages {
                    self.use_region(copy.block.region, begins);
                }
            }
            Work::Blocks(moves) => {
                for copy in moves {
                    self.use_region(copy.from.region, begins);
                    self.use_region(copy.to.region, begins);
                }
            }
        }
    }

    fn use_region(&mut self, id: RegionId, begins: bool) {
        if let Some(used) = self.regions.get_mut(&id) {
            used.count(begins);
        }
    }

    fn number(&mut self) -> u32 {
        self.next += 1;
        self.next
    }
}

impl<R: Region, T> Places for Registry<R, T> {
    fn region(&self, region: RegionId) -> Option<(u64, bool)> {
        self.regions.get(&region).map(|used| (used.value.bytes(), used.value.is_writable()))
    }

    fn layout(&self, tensors: TensorsId) -> Option<&PagedLayout> {
        self.tensors.get(&tensors).map(|used| &used.value.layout)
    }

    fn is_host(&self, region: RegionId) -> bool {
        self.regions.get(&region).is_some_and(|used| used.value.is_host())
    }
}

impl<V> Used<V> {
    fn count(&mut self, begins: bool) {
        self.users = if begins { self.users + 1 } else { self.users - 1 };
    }
}

fn free<V>(used: Option<&Used<V>>) -> Result<(), DeviceError> {
    match used {
        None => Err(DeviceError::Unknown),
        Some(used) if used.users > 0 => Err(DeviceError::InUse),
        Some(_) => Ok(()),
    }
}
