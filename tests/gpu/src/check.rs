//! Checks copies: fresh random bytes, poisoned targets, every layout, compared with a plain reference.

use larder_device::cuda::Form;
use larder_device::layout::{Shape, VllmOrder, sglang_latent, sglang_split, vllm};
use larder_device::{Direction, LayoutSpec};

use crate::report::Report;
use crate::rig::Rig;

/// A layout with its name and the bytes of its regions.
type Named = (String, LayoutSpec, Vec<u64>);

/// Bytes of the engine's regions and of the blocks.
#[derive(Clone, PartialEq, Eq)]
struct Image {
    engine: Vec<Vec<u8>>,
    blocks: Vec<u8>,
}

/// Every layout, both ways, both forms, merged and by layer, from the host and from the pool.
pub(crate) fn all(report: &mut Report) -> anyhow::Result<()> {
    let mut random = fastrand::Rng::with_seed(report.seed);
    for (name, spec, regions) in layouts() {
        for form in Form::ALL {
            let mut options = Rig::options(Some(form));
            // Small enough that orders go in pieces.
            options.half_bytes = 256 << 10;
            let mut rig = Rig::new(spec.clone(), &regions, CHUNKS, options)?;
            let mut result = Ok(());
            for (direction, by_layer) in [
                (Direction::Save, false),
                (Direction::Load, false),
                (Direction::Save, true),
                (Direction::Load, true),
            ] {
                result = result.and(one(&mut rig, direction, by_layer, false, &mut random)?);
            }
            if form == Form::Direct {
                result = result.and(one(&mut rig, Direction::Load, false, true, &mut random)?);
            }
            report.check(format!("{name}, {form:?}, both ways"), result);
            rig.close()?;
        }
    }
    Ok(())
}

fn layouts() -> Vec<Named> {
    let heads = Shape { layers: 6, pages: 40, heads: 8, tokens: 16, content_bytes: 512, pages_per_chunk: 2 };
    let latent = Shape { heads: 1, content_bytes: 1_152, ..heads };
    // A page size that is no multiple of the bytes that a thread block copies, and runs of 48 bytes.
    let odd = Shape { layers: 3, pages: 40, heads: 5, tokens: 7, content_bytes: 48, pages_per_chunk: 3 };
    let mut all: Vec<Named> = Vec::new();
    for order in VllmOrder::ALL {
        for (what, shape) in [("heads", heads), ("latent", latent), ("odd", odd)] {
            let (spec, regions) = vllm(order, &shape);
            all.push((format!("vLLM {}, {what}", order.name()), spec, regions));
        }
    }
    let half = Shape { content_bytes: 256, ..heads };
    for (name, (spec, regions)) in
        [("SGLang, heads", sglang_split(&half)), ("SGLang, latent", sglang_latent(&latent))]
    {
        all.push((name.into(), spec, regions));
    }
    all
}

/// Runs one order. Returns its error, if any.
fn one(
    rig: &mut Rig,
    direction: Direction,
    by_layer: bool,
    from_pool: bool,
    random: &mut fastrand::Rng,
) -> anyhow::Result<Result<(), String>> {
    let pages = rig.pages(random);
    let start = fresh(rig, direction, random);
    for (number, bytes) in start.engine.iter().enumerate() {
        rig.write(rig.engine[number].0, bytes)?;
    }
    let blocks = if from_pool { rig.pool } else { rig.arena_region };
    if from_pool {
        rig.write(rig.pool, &start.blocks)?;
    }
    rig.arena.write(0, &start.blocks);
    rig.run(vec![rig.order(direction, by_layer, blocks, &pages)])?;
    let mut found = Image { engine: Vec::new(), blocks: vec![0; start.blocks.len()] };
    rig.arena.read(0, &mut found.blocks);
    for (region, bytes) in rig.engine.clone() {
        found.engine.push(rig.read(region, bytes)?);
    }
    let expected = reference(rig, direction, &pages, start);
    if found == expected {
        return Ok(Ok(()));
    }
    let differ = |a: &[u8], b: &[u8]| a.iter().zip(b).filter(|(a, b)| a != b).count();
    let wrong = differ(&found.blocks, &expected.blocks)
        + found.engine.iter().zip(&expected.engine).map(|(a, b)| differ(a, b)).sum::<usize>();
    let what = if from_pool { "from the pool" } else { "from the host" };
    Ok(Err(format!("{wrong} bytes, {direction:?}, by layer {by_layer}, {what}")))
}

/// Fills the source of a copy with random bytes, and its target with poison.
fn fresh(rig: &Rig, direction: Direction, random: &mut fastrand::Rng) -> Image {
    let mut fill = |bytes: u64, is_source: bool| {
        let mut out = vec![POISON; bytes as usize];
        if is_source {
            random.fill(&mut out);
        }
        out
    };
    let saves = direction == Direction::Save;
    let engine = rig.engine.iter().map(|&(_, bytes)| fill(bytes, saves)).collect();
    Image { engine, blocks: fill(rig.order_bytes(), !saves) }
}

/// Copies byte by byte, with the layout's places of runs.
fn reference(rig: &Rig, direction: Direction, pages: &[u32], mut image: Image) -> Image {
    let per_chunk = rig.layout.spec().pages_per_chunk;
    for plane in 0..rig.layout.spec().planes.len() as u32 {
        for (&page, number) in pages.iter().zip(0..) {
            let block = u64::from(number / per_chunk) * rig.layout.block_bytes();
            let start = block + rig.layout.in_block(plane, number % per_chunk);
            for run in rig.layout.runs(plane, page) {
                for (offset, at) in run.range.enumerate() {
                    let in_block = (start + run.in_page) as usize + offset;
                    let in_engine = &mut image.engine[run.region as usize][at as usize];
                    match direction {
                        Direction::Load => *in_engine = image.blocks[in_block],
                        Direction::Save => image.blocks[in_block] = *in_engine,
                    }
                }
            }
        }
    }
    image
}

const CHUNKS: u64 = 9;
const POISON: u8 = 0xA5;
