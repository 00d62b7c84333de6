//! Sums bytes with the widest registers of the processor, and can copy them on the way.
//!
//! The sum is xxh3-64 with seed 0, as its specification says. Stripes of 64 bytes go into eight lanes; after each block of 16
//! stripes the lanes are scrambled. The last stripe counts differently, so the last bytes are held back until the end is known.
//! The program chooses the registers when it runs: with the registers that every processor of the architecture has, summing took
//! a third of the time of a put.
#![expect(unsafe_code, reason = "vector registers, and copies between memory that other processes see")]

use std::arch::asm;
use std::ptr;

use xxhash_rust::const_xxh3::const_custom_default_secret;
use xxhash_rust::xxh3::xxh3_64;

use super::{BlockSummer, RangeChecksum, Sum};

/// The state of a sum.
#[derive(Clone)]
pub(super) struct Wide {
    lanes: Lanes,
    kernel: Kernel,
    /// Stripes since the lanes were scrambled.
    stripes: usize,
    /// Bytes so far.
    total: u64,
    /// The last bytes so far, not in the lanes yet: at least a stripe, if there were so many bytes.
    held: [u8; HELD_BYTES],
    held_bytes: usize,
}

/// How copied bytes are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stores {
    /// Into the processor's caches: for bytes that are read soon.
    Cached,
    /// Past the caches, if the target is at a multiple of 64 and the processor can do it: for many bytes. This saves reading the
    /// target, and leaves the caches to others.
    Streamed,
}

#[derive(Clone, Copy)]
#[repr(align(64))]
struct Lanes([u64; 8]);

/// The registers to use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kernel {
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl RangeChecksum {
    /// Copies `bytes` bytes and adds them to the checksum. Each byte is read once, so the sum is the sum of the stored bytes,
    /// whatever others write to the source meanwhile.
    ///
    /// # Safety
    /// `from` can be read and `to` be written for `bytes` bytes, without overlap. Nobody has a reference to bytes of `to`,
    /// nor to bytes of `from` that others may write.
    pub unsafe fn copy(&mut self, from: *const u8, to: *mut u8, bytes: usize, stores: Stores) {
        match &mut self.0 {
            // SAFETY: the caller's promise.
            Sum::Wide(sum) => unsafe { sum.copy(from, to, bytes, stores) },
            Sum::Plain(sum) => {
                let mut copied = [0; COPIED_BYTES];
                for at in (0..bytes).step_by(COPIED_BYTES) {
                    let piece = &mut copied[..COPIED_BYTES.min(bytes - at)];
                    // SAFETY: within what the caller promised.
                    unsafe { copy_once(from.add(at), piece, to.add(at)) };
                    sum.update(piece);
                }
            }
        }
    }
}

impl BlockSummer {
    /// Copies `bytes` bytes and adds them to the checksum, as [`RangeChecksum::copy`] does.
    ///
    /// # Safety
    /// As there.
    pub unsafe fn copy(&mut self, from: *const u8, to: *mut u8, bytes: usize, stores: Stores) {
        let mut at = 0;
        while at < bytes {
            let now = self.left_of_range().min(bytes - at);
            // SAFETY: within what the caller promised.
            unsafe { self.range.copy(from.add(at), to.add(at), now, stores) };
            self.has_added(now);
            at += now;
        }
    }
}

impl Wide {
    /// The sum of no bytes; `None` if this module knows no wide registers of the processor.
    pub(super) fn new() -> Option<Self> {
        let (lanes, held) = (Lanes(START), [0; HELD_BYTES]);
        Some(Self { lanes, kernel: Kernel::best()?, stripes: 0, total: 0, held, held_bytes: 0 })
    }

    /// Adds bytes.
    pub(super) fn update(&mut self, piece: &[u8]) {
        // SAFETY: nothing is stored without a target.
        unsafe { self.add(piece.as_ptr(), ptr::null_mut(), piece.len(), Store::Nowhere) }
    }

    /// The sum of the bytes so far.
    pub(super) fn finish(&self) -> u64 {
        let held = &self.held[..self.held_bytes];
        if self.total <= LONGEST_SHORT {
            return xxh3_64(held);
        }
        let mut lanes = self.lanes;
        let before_last = (held.len() - 1) / STRIPE_BYTES;
        // SAFETY: these stripes are in `held`, and nothing is stored.
        unsafe {
            self.kernel.add(
                &mut lanes,
                self.stripes,
                held.as_ptr(),
                ptr::null_mut(),
                before_last,
                Store::Nowhere,
            )
        };
        lanes.add_last(&held[held.len() - STRIPE_BYTES..]);
        lanes.merge(self.total)
    }

    /// # Safety
    /// As [`RangeChecksum::copy`].
    unsafe fn copy(&mut self, from: *const u8, to: *mut u8, bytes: usize, stores: Stores) {
        let store = match stores {
            Stores::Streamed if bytes >= HELD_BYTES => Store::Streamed,
            _ => Store::Cached,
        };
        // SAFETY: the caller's promise.
        unsafe { self.add(from, to, bytes, store) };
    }

    /// # Safety
    /// `from` can be read for `bytes` bytes, and `to` written unless nothing is stored; they do not overlap.
    unsafe fn add(&mut self, mut from: *const u8, mut to: *mut u8, mut bytes: usize, store: Store) {
        self.total += bytes as u64;
        if self.held_bytes + bytes > HELD_BYTES {
            if self.held_bytes > 0 {
                let fill = HELD_BYTES - self.held_bytes;
                // SAFETY: more than `fill` bytes come.
                unsafe { self.hold(from, to, fill, store) };
                (from, to, bytes) = (from.wrapping_add(fill), to.wrapping_add(fill), bytes - fill);
                self.take_in_held(bytes > STRIPE_BYTES);
            }
            if self.held_bytes == 0 {
                let stripes = (bytes - STRIPE_BYTES - 1) / STRIPE_BYTES;
                // SAFETY: so many stripes come.
                unsafe { self.take_in(from, to, stripes, store) };
                let taken = stripes * STRIPE_BYTES;
                (from, to, bytes) = (from.wrapping_add(taken), to.wrapping_add(taken), bytes - taken);
            }
        }
        // SAFETY: these are the rest of the caller's bytes, and there is room for them.
        unsafe { self.hold(from, to, bytes, store) };
    }

    /// Holds bytes back, each read once.
    ///
    /// # Safety
    /// As [`Self::add`]; there is room for the bytes.
    unsafe fn hold(&mut self, from: *const u8, to: *mut u8, bytes: usize, store: Store) {
        let held = &mut self.held[self.held_bytes..][..bytes];
        if store == Store::Nowhere {
            // SAFETY: the caller's promise; `held` is this value's own.
            unsafe { ptr::copy_nonoverlapping(from, held.as_mut_ptr(), bytes) };
        } else {
            // SAFETY: as above.
            unsafe { copy_once(from, held, to) };
        }
        self.held_bytes += bytes;
    }

    /// Takes the held bytes into the lanes: all of them if more than a stripe follows, otherwise all but one stripe.
    fn take_in_held(&mut self, more_follows: bool) {
        let stripes = HELD_BYTES / STRIPE_BYTES - usize::from(!more_follows);
        let mut held = self.held;
        // SAFETY: so many stripes are held, and nothing is stored.
        unsafe { self.take_in(held.as_ptr(), ptr::null_mut(), stripes, Store::Nowhere) };
        held.copy_within(stripes * STRIPE_BYTES.., 0);
        (self.held, self.held_bytes) = (held, HELD_BYTES - stripes * STRIPE_BYTES);
    }

    /// # Safety
    /// As [`Self::add`], for so many stripes.
    unsafe fn take_in(&mut self, from: *const u8, to: *mut u8, stripes: usize, store: Store) {
        // SAFETY: the caller's promise.
        unsafe { self.kernel.add(&mut self.lanes, self.stripes, from, to, stripes, store) };
        self.stripes = (self.stripes + stripes) % BLOCK_STRIPES;
    }
}

impl Lanes {
    /// The lanes as one number, for so many bytes.
    fn merge(&self, total: u64) -> u64 {
        let mut sum = total.wrapping_mul(PRIME64_1);
        for (lanes, secret) in self.0.chunks_exact(2).zip(SECRET[11..].chunks_exact(16)) {
            let product = u128::from(lanes[0] ^ word(secret, 0)) * u128::from(lanes[1] ^ word(secret, 1));
            sum = sum.wrapping_add(product as u64 ^ (product >> 64) as u64);
        }
        sum = (sum ^ (sum >> 37)).wrapping_mul(0x1656_6791_9E37_79F9);
        sum ^ (sum >> 32)
    }

    /// Adds the last stripe.
    fn add_last(&mut self, stripe: &[u8]) {
        let secret = &SECRET[SECRET.len() - STRIPE_BYTES - 7..];
        for lane in 0..8 {
            let (value, key) = (word(stripe, lane), word(stripe, lane) ^ word(secret, lane));
            self.0[lane ^ 1] = self.0[lane ^ 1].wrapping_add(value);
            self.0[lane] = self.0[lane].wrapping_add((key & 0xFFFF_FFFF) * (key >> 32));
        }
    }
}

/// Whether and how stripes that are added are stored.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Store {
    Nowhere,
    Cached,
    Streamed,
}

impl Kernel {
    #[cfg(target_arch = "x86_64")]
    fn best() -> Option<Self> {
        if is_x86_feature_detected!("avx512f") {
            Some(Self::Avx512)
        } else {
            is_x86_feature_detected!("avx2").then_some(Self::Avx2)
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn best() -> Option<Self> {
        None
    }

    /// Adds stripes to the lanes; `first` stripes were added since the lanes were last scrambled.
    ///
    /// # Safety
    /// `from` can be read for so many stripes, and `to` written unless nothing is stored; they do not overlap.
    #[cfg(target_arch = "x86_64")]
    unsafe fn add(
        self,
        lanes: &mut Lanes,
        first: usize,
        from: *const u8,
        to: *mut u8,
        stripes: usize,
        store: Store,
    ) {
        use std::arch::x86_64::_mm_sfence;
        let streams = store == Store::Streamed && (to as usize).is_multiple_of(STRIPE_BYTES);
        // SAFETY: the caller's promise; `best` found that the processor has these registers.
        unsafe {
            match (self, store) {
                (Self::Avx2, Store::Nowhere) => avx2::<SUM>(lanes, first, from, to, stripes),
                (Self::Avx2, _) if streams => avx2::<STREAM>(lanes, first, from, to, stripes),
                (Self::Avx2, _) => avx2::<COPY>(lanes, first, from, to, stripes),
                (Self::Avx512, Store::Nowhere) => avx512::<SUM>(lanes, first, from, to, stripes),
                (Self::Avx512, _) if streams => avx512::<STREAM>(lanes, first, from, to, stripes),
                (Self::Avx512, _) => avx512::<COPY>(lanes, first, from, to, stripes),
            }
        }
        if streams {
            // SAFETY: every processor of this architecture has this instruction. After it, the stored bytes are visible to
            // everybody who is told of them.
            unsafe { _mm_sfence() };
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    unsafe fn add(self, _: &mut Lanes, _: usize, _: *const u8, _: *mut u8, _: usize, _: Store) {
        match self {}
    }
}

/// Defines the function that adds stripes, for one width of registers. The arguments are the registers' feature, type, class and
/// bytes; then the instruction that loads a register exactly once; then the functions that load, store, stream and set a
/// register, and that calculate.
#[cfg(target_arch = "x86_64")]
macro_rules! kernel {
    (
        $name:ident, $feature:literal, $vector:ident, $class:ident, $bytes:literal, $load_once:literal,
        $load:ident, $store:ident, $stream:ident, $set:ident,
        $add:ident, $xor:ident, $multiply:ident, $right:ident, $left:ident, $swap:ident
    ) => {
        /// # Safety
        /// As [`Kernel::add`]; the processor has the feature. To stream, `to` is at a multiple of a stripe.
        #[target_feature(enable = $feature)]
        unsafe fn $name<const MODE: u8>(
            lanes: &mut Lanes,
            mut first: usize,
            mut from: *const u8,
            mut to: *mut u8,
            mut stripes: usize,
        ) {
            use std::arch::x86_64::*;
            let at = lanes.0.as_mut_ptr().cast::<$vector>();
            let secret = SECRET.as_ptr();
            let mut sums = [$set(0); STRIPE_BYTES / $bytes];
            // SAFETY: `lanes` has as many bytes as a stripe; the other places are those that the caller promised, or parts of
            // the secret, which is longer than a block's stripes times eight, and a stripe.
            unsafe {
                for (vector, sum) in sums.iter_mut().enumerate() {
                    *sum = $load(at.add(vector));
                }
                while stripes > 0 {
                    let last = BLOCK_STRIPES.min(first + stripes);
                    stripes -= last - first;
                    for stripe in first..last {
                        if MODE != SUM {
                            _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(PREFETCHED_BYTES).cast());
                        }
                        for (vector, sum) in sums.iter_mut().enumerate() {
                            let from = from.add(vector * $bytes);
                            let value: $vector;
                            if MODE == SUM {
                                value = $load(from.cast());
                            } else {
                                // Assembly keeps the compiler from reading the place twice.
                                asm!(
                                    concat!($load_once, " {value}, [{from}]"),
                                    value = lateout($class) value,
                                    from = in(reg) from,
                                    options(nostack, preserves_flags, readonly)
                                );
                            }
                            match MODE {
                                COPY => $store(to.wrapping_add(vector * $bytes).cast(), value),
                                STREAM => $stream(to.wrapping_add(vector * $bytes).cast(), value),
                                _ => {}
                            }
                            let key = $xor(value, $load(secret.add(8 * stripe + vector * $bytes).cast()));
                            let product = $multiply(key, $right::<32>(key));
                            *sum = $add(*sum, $add(product, $swap::<SWAPPED_WORDS>(value)));
                        }
                        (from, to) = (from.add(STRIPE_BYTES), to.wrapping_add(STRIPE_BYTES));
                    }
                    first = last % BLOCK_STRIPES;
                    if first == 0 {
                        let prime = $set(PRIME32_1 as i64);
                        for (vector, sum) in sums.iter_mut().enumerate() {
                            let key = secret.add(SECRET.len() - STRIPE_BYTES + vector * $bytes);
                            let mixed = $xor($xor(*sum, $right::<47>(*sum)), $load(key.cast()));
                            let high = $multiply($right::<32>(mixed), prime);
                            *sum = $add($multiply(mixed, prime), $left::<32>(high));
                        }
                    }
                }
                for (vector, sum) in sums.into_iter().enumerate() {
                    $store(at.add(vector), sum);
                }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
kernel!(
    avx2,
    "avx2",
    __m256i,
    ymm_reg,
    32,
    "vmovdqu",
    _mm256_loadu_si256,
    _mm256_storeu_si256,
    _mm256_stream_si256,
    _mm256_set1_epi64x,
    _mm256_add_epi64,
    _mm256_xor_si256,
    _mm256_mul_epu32,
    _mm256_srli_epi64,
    _mm256_slli_epi64,
    _mm256_shuffle_epi32
);

#[cfg(target_arch = "x86_64")]
kernel!(
    avx512,
    "avx512f",
    __m512i,
    zmm_reg,
    64,
    "vmovdqu64",
    _mm512_loadu_si512,
    _mm512_storeu_si512,
    _mm512_stream_si512,
    _mm512_set1_epi64,
    _mm512_add_epi64,
    _mm512_xor_si512,
    _mm512_mul_epu32,
    _mm512_srli_epi64,
    _mm512_slli_epi64,
    _mm512_shuffle_epi32
);

/// Copies bytes from `from` to `to` and to `seen`, as many as `seen` has room for. Both copies are the same, even if others write
/// `from` meanwhile.
///
/// # Safety
/// `from` can be read and `to` written for so many bytes; they overlap neither each other nor `seen`.
unsafe fn copy_once(from: *const u8, seen: &mut [u8], to: *mut u8) {
    // SAFETY: the caller's promise. The assembly between the copies executes nothing. The compiler must assume that it changes
    // `seen`; otherwise the compiler could copy from `from` a second time.
    unsafe {
        ptr::copy_nonoverlapping(from, seen.as_mut_ptr(), seen.len());
        asm!("/* {} */", in(reg) seen.as_mut_ptr(), options(nostack, preserves_flags));
        ptr::copy_nonoverlapping(seen.as_ptr(), to, seen.len());
    }
}

fn word(bytes: &[u8], number: usize) -> u64 {
    u64::from_le_bytes(bytes[8 * number..][..8].try_into().expect("a word has eight bytes"))
}

/// The mode of a kernel: it only sums stripes, or also copies or streams them.
#[cfg(target_arch = "x86_64")]
const SUM: u8 = 0;
#[cfg(target_arch = "x86_64")]
const COPY: u8 = 1;
#[cfg(target_arch = "x86_64")]
const STREAM: u8 = 2;

const STRIPE_BYTES: usize = 64;

/// Swaps the words of a stripe's lanes with the words of their neighbor lanes, in pairs.
#[cfg(target_arch = "x86_64")]
const SWAPPED_WORDS: i32 = 0b01_00_11_10;

/// Stripes of a block: as many as the secret has room for, with each stripe's key eight bytes further on.
const BLOCK_STRIPES: usize = (SECRET.len() - STRIPE_BYTES) / 8;

/// Up to this number of bytes, the specification has another sum, computed over all bytes at once.
const LONGEST_SHORT: u64 = 240;

/// The most bytes that are held back: whole stripes, and more bytes than `LONGEST_SHORT`.
const HELD_BYTES: usize = 256;

/// The copy prefetches this many bytes ahead: the processor itself does not look beyond a page.
#[cfg(target_arch = "x86_64")]
const PREFETCHED_BYTES: usize = 1024;

/// Bytes copied at a time without wide registers.
const COPIED_BYTES: usize = 4 << 10;

const SECRET: [u8; 192] = const_custom_default_secret(0);

const PRIME32_1: u64 = 0x9E37_79B1;
const PRIME32_2: u64 = 0x85EB_CA77;
const PRIME32_3: u64 = 0xC2B2_AE3D;
const PRIME64_1: u64 = 0x9E37_79B1_85EB_CA87;
const PRIME64_2: u64 = 0xC2B2_AE3D_27D4_EB4F;
const PRIME64_3: u64 = 0x1656_67B1_9E37_79F9;
const PRIME64_4: u64 = 0x85EB_CA77_C2B2_AE63;
const PRIME64_5: u64 = 0x27D4_EB2F_1656_67C5;

/// The lanes of no bytes.
const START: [u64; 8] =
    [PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1];

#[cfg(test)]
mod tests;
