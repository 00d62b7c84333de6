//! The speed of copies, compared with the speed of large plain copies in the same run.

use std::time::{Duration, Instant};

use larder_device::Direction::{self, Load, Save};
use larder_device::cuda::{CudaOptions, Form};
use larder_device::layout::{Shape, VllmOrder, sglang_split, vllm};
use larder_device::{Device as _, LayoutSpec, Order};

use crate::engine;
use crate::report::{Report, Wanted};
use crate::rig::{Rig, Times};

/// The speed of large copies, in GB/s.
#[derive(Clone, Copy)]
struct Ceilings {
    load: f64,
    save: f64,
    both: f64,
    device: f64,
}

/// Numbers of thread blocks that are compared.
const THREAD_BLOCKS: [u32; 4] = [4, 8, 16, 32];

/// Sizes of a run.
#[derive(Clone, Copy)]
struct Sizes {
    chunks: u64,
    layers: u32,
    pages: u32,
    large_bytes: u64,
    rounds: usize,
    /// Whether rates mean anything.
    is_judged: bool,
}

/// 64 chunks of 32 layers in pages of 16 tokens, of 256 pages.
const REAL: Sizes =
    Sizes { chunks: 64, layers: 32, pages: 256, large_bytes: 1 << 30, rounds: 15, is_judged: true };
const SMALL: Sizes =
    Sizes { chunks: 4, layers: 4, pages: 8, large_bytes: 1 << 20, rounds: 3, is_judged: false };

impl Sizes {
    fn wanted(self, wanted: Wanted) -> Option<Wanted> {
        self.is_judged.then_some(wanted)
    }
}

pub(crate) fn all(report: &mut Report, small: bool) -> anyhow::Result<()> {
    let sizes = if small { SMALL } else { REAL };
    let mut random = fastrand::Rng::with_seed(report.seed);
    let ceilings = ceilings(report, sizes)?;
    for shape in shapes(sizes) {
        all_of(report, &shape, sizes, &ceilings, &mut random)?;
    }
    by_thread_blocks(report, sizes, &ceilings, &mut random)?;
    engine::beside(report, sizes.chunks, sizes.layers, sizes.pages)
}

/// Measures one shape: each form, then the form chosen by measurement.
fn all_of(
    report: &mut Report,
    shape: &Measured,
    sizes: Sizes,
    ceilings: &Ceilings,
    random: &mut fastrand::Rng,
) -> anyhow::Result<()> {
    let Measured { name, spec, regions, chunks } = shape;
    let rig = |form, random: &mut fastrand::Rng| {
        let mut rig = Rig::new(spec.clone(), regions, *chunks, Rig::options(form))?;
        rig.randomise(random)?;
        Ok::<_, anyhow::Error>(rig)
    };
    for form in Form::ALL {
        let mut rig = rig(Some(form), random)?;
        each_way(report, &mut rig, &format!("{name}, {form:?}"), sizes, ceilings, None, random)?;
        rig.close()?;
    }
    let mut rig = rig(None, random)?;
    chosen(report, &mut rig, name, sizes, ceilings, random)?;
    by_layer(report, &mut rig, name, sizes, random)?;
    from_pool(report, &mut rig, name, sizes, ceilings, random)?;
    report.notes.extend(rig.device().choices().into_iter().map(|line| format!("{name}: {line}")));
    rig.close()
}

/// Measures the kernels with few and many thread blocks: the fewest that fill the bus leave most of the GPU to the engine.
fn by_thread_blocks(
    report: &mut Report,
    sizes: Sizes,
    ceilings: &Ceilings,
    random: &mut fastrand::Rng,
) -> anyhow::Result<()> {
    let Measured { name, spec, regions, chunks } = shapes(sizes).swap_remove(0);
    for form in [Form::Direct, Form::Staged] {
        for blocks in THREAD_BLOCKS {
            let options =
                CudaOptions { bus_blocks: blocks, staged_blocks: blocks, ..Rig::options(Some(form)) };
            let mut rig = Rig::new(spec.clone(), &regions, chunks, options)?;
            rig.randomise(random)?;
            let name = format!("{name}, {form:?} by {blocks} thread blocks");
            each_way(report, &mut rig, &name, sizes, ceilings, None, random)?;
            rig.close()?;
        }
    }
    Ok(())
}

/// Copies in a loop, to measure the slowdown of other work.
#[expect(clippy::disallowed_methods, reason = "a program that measures has a clock")]
pub(crate) fn busy(seconds: u64, form: Form) -> anyhow::Result<()> {
    let Measured { spec, regions, chunks, .. } = shapes(REAL).swap_remove(0);
    let mut rig = Rig::new(spec, &regions, chunks, Rig::options(Some(form)))?;
    let mut random = fastrand::Rng::new();
    rig.randomise(&mut random)?;
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(seconds) {
        let orders = one_way(&mut rig, Load, &mut random);
        rig.run(orders)?;
    }
    rig.close()
}

/// A layout to measure, and the chunks that an order moves.
struct Measured {
    name: String,
    spec: LayoutSpec,
    regions: Vec<u64>,
    chunks: u64,
}

/// Llama-3-8B's heads in vLLM's orders with whole and with scattered pages, in SGLang's pools; latent attention; pages of other
/// sizes. Llama-3-8B's pages have 64 KiB. All orders have about the same bytes.
fn shapes(sizes: Sizes) -> Vec<Measured> {
    let Sizes { layers, pages, chunks, .. } = sizes;
    let heads = Shape { layers, pages, heads: 8, tokens: 16, content_bytes: 512, pages_per_chunk: 1 };
    let latent = Shape { heads: 1, content_bytes: 1_152, pages: pages * 4, ..heads };
    let of = |name: &str, (spec, regions), chunks| Measured { name: name.to_owned(), spec, regions, chunks };
    let small = Shape { content_bytes: 128, pages: pages * 4, ..heads };
    let large = Shape { content_bytes: 2_048, layers: layers / 4, ..heads };
    let largest = Shape { content_bytes: 16_384, layers: layers / 4, pages: pages / 4, ..heads };
    vec![
        of("Llama-3-8B LBHNC", vllm(VllmOrder::Lbhnc, &heads), chunks),
        of("Llama-3-8B BLNHC", vllm(VllmOrder::Blnhc, &heads), chunks),
        of("Llama-3-8B LHBNC", vllm(VllmOrder::Lhbnc, &heads), chunks),
        of("Llama-3-8B SGLang", sglang_split(&Shape { content_bytes: 256, ..heads }), chunks),
        of("latent LBHNC", vllm(VllmOrder::Lbhnc, &latent), chunks * 4),
        of("16 KiB pages LBHNC", vllm(VllmOrder::Lbhnc, &small), chunks * 4),
        of("256 KiB pages LBHNC", vllm(VllmOrder::Lbhnc, &large), chunks),
        of("2 MiB pages LBHNC", vllm(VllmOrder::Lbhnc, &largest), (chunks / 4).max(2)),
    ]
}

fn ceilings(report: &mut Report, sizes: Sizes) -> anyhow::Result<Ceilings> {
    let bytes = sizes.large_bytes;
    let shape = Shape { layers: 1, pages: 1, heads: 1, tokens: 1, content_bytes: bytes, pages_per_chunk: 1 };
    let (spec, regions) = vllm(VllmOrder::Lbhnc, &shape);
    let mut rig = Rig::new(spec, &regions, 1, Rig::options(None))?;
    let (host, pool, other) = (rig.arena_region, rig.pool, rig.engine[0].0);
    rig.randomise(&mut fastrand::Rng::with_seed(report.seed))?;
    let load = median(&mut rig, sizes, bytes, |_| vec![Rig::block(host, pool, bytes, Load)])?;
    let save = median(&mut rig, sizes, bytes, |_| vec![Rig::block(pool, host, bytes, Save)])?;
    // Halves, so that the two copies do not touch the same bytes.
    let half = bytes / 2;
    let both = median(&mut rig, sizes, half * 2, |_| {
        let mut save = Rig::block(other, host, half, Save);
        if let larder_device::Work::Blocks(moves) = &mut save.work {
            moves[0].to.offset = half;
        }
        vec![Rig::block(host, pool, half, Load), save]
    })?;
    let device = median(&mut rig, sizes, bytes, |_| vec![Rig::block(pool, other, bytes, Load)])?;
    rig.close()?;
    report.measure("one large pinned copy, host to device", load, "GB/s");
    report.measure("one large pinned copy, device to host", save, "GB/s");
    report.measure("two large pinned copies, both ways at once", both, "GB/s");
    report.measure("one large copy on the device, bytes once", device, "GB/s");
    Ok(Ceilings { load, save, both, device })
}

/// Measures each direction by itself.
fn each_way(
    report: &mut Report,
    rig: &mut Rig,
    name: &str,
    sizes: Sizes,
    ceilings: &Ceilings,
    wanted: Option<Wanted>,
    random: &mut fastrand::Rng,
) -> anyhow::Result<()> {
    let bytes = rig.order_bytes();
    for (direction, what, ceiling) in [(Load, "load", ceilings.load), (Save, "save", ceilings.save)] {
        let rate = median(rig, sizes, bytes, |rig| one_way(rig, direction, random))?;
        report.ratio(format!("{name}, {what}"), rate, "GB/s", ("a large copy", ceiling), wanted);
    }
    Ok(())
}

/// Measures with the form chosen by measurement, as in a node: each direction, and both at once.
fn chosen(
    report: &mut Report,
    rig: &mut Rig,
    name: &str,
    sizes: Sizes,
    ceilings: &Ceilings,
    random: &mut fastrand::Rng,
) -> anyhow::Result<()> {
    // Tries both forms first.
    for direction in [Load, Save].repeat(6) {
        let orders = one_way(rig, direction, random);
        rig.run(orders)?;
    }
    each_way(report, rig, name, sizes, ceilings, sizes.wanted(Wanted::AtLeast(0.95)), random)?;
    let bytes = rig.order_bytes();
    let rate = median(rig, sizes, bytes, |rig| both_ways(rig, random))?;
    let wanted = sizes.wanted(Wanted::AtLeast(0.9));
    report.ratio(format!("{name}, both at once"), rate, "GB/s", ("large copies", ceilings.both), wanted);
    Ok(())
}

/// All chunks, in pages at random.
fn one_way(rig: &mut Rig, direction: Direction, random: &mut fastrand::Rng) -> Vec<Order> {
    let pages = rig.pages(random);
    vec![rig.order(direction, false, rig.arena_region, &pages)]
}

/// Half of the chunks are loaded, the other half saved.
fn both_ways(rig: &mut Rig, random: &mut fastrand::Rng) -> Vec<Order> {
    let pages = rig.pages(random);
    let half = |order: &mut Order, second: bool| {
        if let larder_device::Work::Pages { pages, .. } = &mut order.work {
            let rest = pages.split_off(pages.len() / 2);
            *pages = if second { rest } else { std::mem::take(pages) };
        }
    };
    let mut load = rig.order(Load, false, rig.arena_region, &pages);
    let mut save = rig.order(Save, false, rig.arena_region, &pages);
    half(&mut load, false);
    half(&mut save, true);
    vec![load, save]
}

fn by_layer(
    report: &mut Report,
    rig: &mut Rig,
    name: &str,
    sizes: Sizes,
    random: &mut fastrand::Rng,
) -> anyhow::Result<()> {
    let mut first = Vec::new();
    let bytes = rig.order_bytes();
    let mut merged = Vec::new();
    for _ in 0..sizes.rounds + 8 {
        let pages = rig.pages(random);
        let times = rig.run(vec![rig.order(Load, true, rig.arena_region, &pages)])?;
        first.push(times.first_layer.unwrap_or(times.end).as_secs_f64() / times.end.as_secs_f64());
        merged.push(rate(bytes, &times));
    }
    let layers = rig.layout.layers();
    let what = format!("{name}, time to layer 1 of {layers}");
    let wanted = sizes.wanted(Wanted::AtMost(1.6 / f64::from(layers)));
    report.ratio(what, middle(first), "", ("the whole load", 1.0), wanted);
    report.measure(format!("{name}, load layer by layer"), middle(merged), "GB/s");
    Ok(())
}

fn from_pool(
    report: &mut Report,
    rig: &mut Rig,
    name: &str,
    sizes: Sizes,
    ceilings: &Ceilings,
    random: &mut fastrand::Rng,
) -> anyhow::Result<()> {
    let bytes = rig.order_bytes();
    let rate = median(rig, sizes, bytes, |rig| {
        let pages = rig.pages(random);
        vec![rig.order(Load, false, rig.pool, &pages)]
    })?;
    let of = ("a large copy on the device", ceilings.device);
    let wanted = sizes.wanted(Wanted::AtLeast(0.8));
    report.ratio(format!("{name}, hit on the device"), rate, "GB/s", of, wanted);
    Ok(())
}

/// The median rate of some rounds, after some rounds that do not count.
fn median(
    rig: &mut Rig,
    sizes: Sizes,
    bytes: u64,
    mut orders: impl FnMut(&mut Rig) -> Vec<Order>,
) -> anyhow::Result<f64> {
    let mut rates = Vec::new();
    for round in 0..sizes.rounds + 2 {
        let orders = orders(rig);
        let times = rig.run(orders)?;
        if round >= 2 {
            rates.push(rate(bytes, &times));
        }
    }
    Ok(middle(rates))
}

fn rate(bytes: u64, times: &Times) -> f64 {
    bytes as f64 / times.end.as_secs_f64() / 1e9
}

fn middle(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
