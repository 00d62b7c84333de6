//! The CUDA driver, as far as copies need it: the only file that names CUDA.
//!
//! The library is loaded at run time, and its functions are looked for before any is called: a machine without a driver, or with
//! an old one, gives an error. Values that the driver keeps end with their Rust values, in the context that made them.
#![expect(unsafe_code, reason = "calls a C library")]

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_int, c_void};
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::ptr;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys::{self, CUdevice_attribute_enum as Attribute, CUresult};

use super::PciPlace;
use crate::memory::HostMemory;

/// A device with its primary context, current on the thread that made it.
#[derive(Clone)]
pub(super) struct Context(Rc<ContextInner>);

struct ContextInner {
    device: sys::CUdevice,
}

/// The driver's answer to a refused call.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{call}: {name} ({code})")]
pub(super) struct CudaError {
    call: &'static str,
    code: u32,
    name: String,
}

/// Why there is no CUDA here.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum NoCuda {
    #[error("no CUDA driver is installed: libcuda.so.1 is not found")]
    NoLibrary,
    #[error("the CUDA driver is too old: it has no {0}; version 580 (CUDA 13.0) has")]
    TooOld(&'static str),
    #[error("there is no GPU {wanted}: the driver knows {found}")]
    NoDevice { wanted: u32, found: u32 },
    #[error("the driver knows no GPU at {0}")]
    NotThere(PciPlace),
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

/// Memory of the device, of our own or an engine's.
pub(super) struct DeviceMemory {
    address: u64,
    bytes: u64,
    origin: Origin,
    _context: Context,
}

enum Origin {
    Allocated,
    /// The address that the driver gave the allocation; its used part may begin later.
    Ipc(u64),
    Mapped {
        handle: u64,
    },
    /// Memory of this process that somebody else owns.
    Borrowed,
}

/// Host memory that the device reads and writes by itself.
pub(super) struct PinnedMemory {
    memory: HostMemory,
    address: u64,
    _context: Context,
    pins: Pins,
}

/// The number of [`PinnedMemory`]s of one piece of memory. The driver takes each piece only once in a process, and several devices
/// may use it.
struct Pins {
    piece: Piece,
    count: Arc<Mutex<usize>>,
}

/// Address and bytes.
type Piece = (usize, u64);

pub(super) struct Stream {
    raw: sys::CUstream,
    _context: Context,
}

/// Runs to copy: where from, where to, and their bytes.
#[derive(Default)]
pub(super) struct Runs {
    from: Vec<u64>,
    to: Vec<u64>,
    bytes: Vec<usize>,
}

pub(super) struct Event {
    raw: sys::CUevent,
    _context: Context,
}

pub(super) struct Module {
    raw: sys::CUmodule,
    _context: Context,
}

/// A kernel of a module. It keeps the module.
pub(super) struct Kernel {
    raw: sys::CUfunction,
    _module: Rc<Module>,
}

impl CudaError {
    /// The host has no memory.
    pub(super) fn no_memory() -> Self {
        Self { call: "mmap", code: 2, name: "out of memory".into() }
    }

    /// Whether the context is broken for good: the fate of its work is unknown.
    pub(super) fn is_fatal(&self) -> bool {
        // CUDA_ERROR_* of cuda.h: uncorrectable ECC and NVLink errors, a device that is gone, illegal addresses and
        // instructions, hardware stacks, timeouts, assertions, launches that failed, a destroyed context, the unknown.
        matches!(self.code, 4 | 46 | 201 | 214 | 220 | 226 | 700 | 702 | 709 | 710 | 714..=719 | 999)
    }
}

impl Context {
    /// Opens device number `ordinal` on this thread.
    pub(super) fn open(ordinal: u32) -> Result<Self, NoCuda> {
        check_library()?;
        // SAFETY: `check_library` found the functions; the pointers are to live values of the right types.
        unsafe {
            check("cuInit", sys::cuInit(0))?;
            let mut count = 0;
            check("cuDeviceGetCount", sys::cuDeviceGetCount(&raw mut count))?;
            let found = count.cast_unsigned();
            if ordinal >= found {
                return Err(NoCuda::NoDevice { wanted: ordinal, found });
            }
            let mut device = 0;
            check("cuDeviceGet", sys::cuDeviceGet(&raw mut device, ordinal.cast_signed()))?;
            let mut context = ptr::null_mut();
            check("cuDevicePrimaryCtxRetain", sys::cuDevicePrimaryCtxRetain(&raw mut context, device))?;
            let inner = Self(Rc::new(ContextInner { device }));
            check("cuCtxSetCurrent", sys::cuCtxSetCurrent(context))?;
            // While the engine captures a graph on a thread of its own, calls of this thread neither fail nor end the capture.
            let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
            let exchanged = sys::cuThreadExchangeStreamCaptureMode(&raw mut mode);
            check("cuThreadExchangeStreamCaptureMode", exchanged)?;
            Ok(inner)
        }
    }

    pub(super) fn name(&self) -> String {
        let mut name = [0; 128];
        // SAFETY: the buffer is as long as the driver is told, and the driver writes a string that ends within.
        let result =
            unsafe { sys::cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as c_int, self.0.device) };
        let name = CStr::from_bytes_until_nul(&name).unwrap_or_default().to_string_lossy();
        if result == CUresult::CUDA_SUCCESS { name.into_owned() } else { "a GPU without a name".into() }
    }

    pub(super) fn multiprocessors(&self) -> Result<u32, CudaError> {
        self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
    }

    /// Whether host memory can be pinned that may only be read.
    pub(super) fn pins_read_only(&self) -> Result<bool, CudaError> {
        Ok(self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED)? != 0)
    }

    /// Whether memory can be shared by descriptor.
    pub(super) fn shares_descriptors(&self) -> Result<bool, CudaError> {
        Ok(self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)? != 0)
    }

    /// Ends the context for all of this process: after a fatal error nothing else ends its work.
    pub(super) fn reset(&self) -> Result<(), CudaError> {
        // SAFETY: the device is one that the driver gave. Everything that others have in the context is unusable already.
        unsafe { check("cuDevicePrimaryCtxReset", sys::cuDevicePrimaryCtxReset_v2(self.0.device)) }
    }

    fn attribute(&self, attribute: sys::CUdevice_attribute) -> Result<u32, CudaError> {
        attribute_of(self.0.device, attribute)
    }
}

impl Drop for ContextInner {
    fn drop(&mut self) {
        // SAFETY: retained once by `open`, and released once.
        log("cuDevicePrimaryCtxRelease", unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) });
    }
}

impl DeviceMemory {
    pub(super) fn allocate(context: &Context, bytes: u64) -> Result<Self, CudaError> {
        let mut address = 0;
        // SAFETY: the pointer is to a live value of the right type.
        check("cuMemAlloc", unsafe { sys::cuMemAlloc_v2(&raw mut address, bytes as usize) })?;
        Ok(Self { address, bytes, origin: Origin::Allocated, _context: context.clone() })
    }

    /// Maps an allocation of another process; `bytes` bytes from `offset` on are used.
    pub(super) fn open_ipc(
        context: &Context,
        handle: [u8; 64],
        offset: u64,
        bytes: u64,
    ) -> Result<Self, CudaError> {
        let handle = sys::CUipcMemHandle { reserved: handle.map(u8::cast_signed) };
        let (mut start, mut base, mut size) = (0, 0, 0);
        // SAFETY: the pointers are to live values of the right types; the driver checks the handle.
        unsafe {
            check(
                "cuIpcOpenMemHandle",
                sys::cuIpcOpenMemHandle_v2(&raw mut start, handle, LAZY_PEER_ACCESS),
            )?;
        }
        let memory = Self {
            address: start.wrapping_add(offset),
            bytes,
            origin: Origin::Ipc(start),
            _context: context.clone(),
        };
        // SAFETY: as above.
        unsafe {
            let result = sys::cuMemGetAddressRange_v2(&raw mut base, &raw mut size, start);
            check("cuMemGetAddressRange", result)?;
        }
        // Compares the size that the engine claims with what the driver knows.
        let end = offset.checked_add(bytes).and_then(|end| start.checked_add(end));
        if end.is_none_or(|end| end > base + size as u64) {
            return Err(beyond("an engine's memory"));
        }
        Ok(memory)
    }

    /// Maps an allocation of another process by its descriptor, whole.
    pub(super) fn map_descriptor(
        context: &Context,
        descriptor: &OwnedFd,
        bytes: u64,
    ) -> Result<Self, CudaError> {
        let location = sys::CUmemLocation {
            type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
            id: context.0.device,
        };
        let access = sys::CUmemAccessDesc {
            location,
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        let kind = sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        let (size, os) = (bytes as usize, descriptor.as_raw_fd() as usize as *mut c_void);
        let (mut handle, mut address) = (0, 0);
        // SAFETY: the pointers are to live values of the right types; a descriptor is passed as the pointer's value, as the
        // driver wants it. The driver checks the descriptor, and refuses to map more than the allocation has. If a later step
        // fails, the calls below undo the reserved address, and `drop` undoes the rest.
        unsafe {
            let result = sys::cuMemImportFromShareableHandle(&raw mut handle, os, kind);
            check("cuMemImportFromShareableHandle", result)?;
            let reserved =
                check("cuMemAddressReserve", sys::cuMemAddressReserve(&raw mut address, size, 0, 0, 0));
            if let Err(error) = reserved {
                log("cuMemRelease", sys::cuMemRelease(handle));
                return Err(error);
            }
            if let Err(error) = check("cuMemMap", sys::cuMemMap(address, size, 0, handle, 0)) {
                log("cuMemAddressFree", sys::cuMemAddressFree(address, size));
                log("cuMemRelease", sys::cuMemRelease(handle));
                return Err(error);
            }
            let memory =
                Self { address, bytes, origin: Origin::Mapped { handle }, _context: context.clone() };
            check("cuMemSetAccess", sys::cuMemSetAccess(address, size, &raw const access, 1))?;
            Ok(memory)
        }
    }

    /// Memory of this process. The driver must know it all.
    pub(super) fn borrow(context: &Context, address: u64, bytes: u64) -> Result<Self, CudaError> {
        let end = address.checked_add(bytes).ok_or_else(|| beyond("the engine's memory"))?;
        // PyTorch's expandable segments are many allocations, mapped one behind the other.
        let mut known = address;
        while known < end {
            let (mut base, mut size) = (0, 0);
            // SAFETY: the pointers are to live values of the right types; the driver checks the address.
            let result = unsafe { sys::cuMemGetAddressRange_v2(&raw mut base, &raw mut size, known) };
            check("cuMemGetAddressRange", result)?;
            let next = base.saturating_add(size as u64);
            if next <= known {
                return Err(beyond("the engine's memory"));
            }
            known = next;
        }
        Ok(Self { address, bytes, origin: Origin::Borrowed, _context: context.clone() })
    }

    pub(super) fn address(&self) -> u64 {
        self.address
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        let size = self.bytes as usize;
        // SAFETY: what was made once is ended once. Copies that use it have ended: the registry keeps it until then.
        unsafe {
            match self.origin {
                Origin::Allocated => log("cuMemFree", sys::cuMemFree_v2(self.address)),
                Origin::Ipc(start) => log("cuIpcCloseMemHandle", sys::cuIpcCloseMemHandle(start)),
                Origin::Mapped { handle } => {
                    log("cuMemUnmap", sys::cuMemUnmap(self.address, size));
                    log("cuMemAddressFree", sys::cuMemAddressFree(self.address, size));
                    log("cuMemRelease", sys::cuMemRelease(handle));
                }
                Origin::Borrowed => {}
            }
        }
    }
}

impl PinnedMemory {
    pub(super) fn pin(context: &Context, memory: HostMemory) -> Result<Self, CudaError> {
        let (start, bytes) = (memory.as_ptr().cast::<c_void>(), memory.bytes() as usize);
        let flags =
            if memory.is_writable() { PORTABLE | DEVICE_MAP } else { PORTABLE | DEVICE_MAP | READ_ONLY };
        let pins = Pins::of(&memory);
        let mut count = lock(&pins.count);
        if *count == 0 {
            // SAFETY: the range is mapped for as long as `memory` lives, which each of its values keeps until it is unpinned.
            check("cuMemHostRegister", unsafe { sys::cuMemHostRegister_v2(start, bytes, flags) })?;
        }
        *count += 1;
        drop(count);
        let mut pinned = Self { memory, address: 0, _context: context.clone(), pins };
        // SAFETY: the memory was registered, and the pointer is to a live value of the right type.
        let pointer = unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut pinned.address, start, 0) };
        check("cuMemHostGetDevicePointer", pointer)?;
        Ok(pinned)
    }

    pub(super) fn memory(&self) -> &HostMemory {
        &self.memory
    }

    /// The address at which the device sees it.
    pub(super) fn address(&self) -> u64 {
        self.address
    }

    /// Lets go of the memory without the driver, whose context has ended.
    pub(super) fn abandon(self) {
        let pinned = ManuallyDrop::new(self);
        *lock(&pinned.pins.count) -= 1;
        // SAFETY: `pinned` is neither used nor dropped afterwards.
        drop(unsafe { (ptr::read(&raw const pinned.memory), ptr::read(&raw const pinned.pins)) });
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        let mut count = lock(&self.pins.count);
        *count -= 1;
        if *count == 0 {
            // SAFETY: the first of its values pinned it, and this is the last one. Copies that use it have ended: the registry
            // keeps it until then.
            log("cuMemHostUnregister", unsafe { sys::cuMemHostUnregister(self.memory.as_ptr().cast()) });
        }
    }
}

impl Pins {
    fn of(memory: &HostMemory) -> Self {
        let piece = (memory.as_ptr() as usize, memory.bytes());
        Self { piece, count: Arc::clone(lock(&PINS).entry(piece).or_default()) }
    }
}

impl Drop for Pins {
    fn drop(&mut self) {
        let mut all = lock(&PINS);
        // The table has the other one.
        if Arc::strong_count(&self.count) == 2 {
            all.remove(&self.piece);
        }
    }
}

impl Stream {
    pub(super) fn new(context: &Context) -> Result<Self, CudaError> {
        let mut raw = ptr::null_mut();
        // SAFETY: the pointer is to a live value of the right type. The driver takes its own highest priority for a higher one.
        let result = unsafe { sys::cuStreamCreateWithPriority(&raw mut raw, NON_BLOCKING, FIRST) };
        check("cuStreamCreateWithPriority", result)?;
        Ok(Self { raw, _context: context.clone() })
    }

    /// Later work on the stream waits for the event.
    pub(super) fn wait(&self, event: &Event) -> Result<(), CudaError> {
        // SAFETY: both are live values of the context.
        check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(self.raw, event.raw, 0) })
    }

    /// Waits, on the calling thread, until all is done.
    pub(super) fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: the stream lives.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.raw) })
    }

    /// Copies by the copy engine, whichever way the addresses say.
    ///
    /// # Safety
    /// Both ranges are memory that the context may access, until this copy has ended.
    pub(super) unsafe fn copy(&self, from: u64, to: u64, bytes: u64) -> Result<(), CudaError> {
        // SAFETY: the caller's promise; addresses are unified.
        check("cuMemcpyAsync", unsafe { sys::cuMemcpyAsync(to, from, bytes as usize, self.raw) })
    }

    /// Copies many runs by the copy engine, in one call.
    ///
    /// # Safety
    /// All ranges are memory that the context may access, until these copies have ended.
    pub(super) unsafe fn copy_runs(&self, runs: &mut Runs) -> Result<(), CudaError> {
        let nowhere =
            sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_INVALID, id: 0 };
        let mut attributes = sys::CUmemcpyAttributes {
            srcAccessOrder: sys::CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
            srcLocHint: nowhere,
            dstLocHint: nowhere,
            flags: BESIDE_COMPUTATION,
        };
        let mut first = 0;
        let Runs { from, to, bytes } = runs;
        // SAFETY: the arrays have one length, and the driver reads them and the attributes before it returns; the rest is the
        // caller's promise.
        let result = unsafe {
            sys::cuMemcpyBatchAsync_v2(
                to.as_mut_ptr(),
                from.as_mut_ptr(),
                bytes.as_mut_ptr(),
                to.len(),
                &raw mut attributes,
                &raw mut first,
                1,
                self.raw,
            )
        };
        check("cuMemcpyBatchAsync", result)
    }

    /// Writes a word after all that came before.
    ///
    /// # Safety
    /// `address` is a word that the device may write, until this has happened.
    pub(super) unsafe fn write_word(&self, address: u64, value: u32) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        check("cuStreamWriteValue32", unsafe { sys::cuStreamWriteValue32_v2(self.raw, address, value, 0) })
    }

    /// Runs a kernel whose only parameter is `argument`.
    ///
    /// # Safety
    /// `argument` is the kernel's parameter, and all memory that it names may be accessed until the kernel has ended.
    pub(super) unsafe fn launch<T: Copy>(
        &self,
        kernel: &Kernel,
        blocks: u32,
        threads: u32,
        argument: &T,
    ) -> Result<(), CudaError> {
        let mut arguments = [ptr::from_ref(argument).cast_mut().cast::<c_void>()];
        // SAFETY: the kernel's parameters are copied before the call returns; the rest is the caller's promise.
        let result = unsafe {
            sys::cuLaunchKernel(
                kernel.raw,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                0,
                self.raw,
                arguments.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        check("cuLaunchKernel", result)
    }
}

impl Runs {
    pub(super) fn add(&mut self, from: u64, to: u64, bytes: u64) {
        self.from.push(from);
        self.to.push(to);
        self.bytes.push(bytes as usize);
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: made once by `new`, and ended once.
        log("cuStreamDestroy", unsafe { sys::cuStreamDestroy_v2(self.raw) });
    }
}

impl Event {
    pub(super) fn new(context: &Context) -> Result<Self, CudaError> {
        let mut raw = ptr::null_mut();
        // SAFETY: the pointer is to a live value of the right type.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&raw mut raw, 0) })?;
        Ok(Self { raw, _context: context.clone() })
    }

    /// Marks the stream's work so far.
    pub(super) fn record(&self, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: both are live values of the context.
        check("cuEventRecord", unsafe { sys::cuEventRecord(self.raw, stream.raw) })
    }

    /// Whether the marked work is done.
    pub(super) fn is_done(&self) -> Result<bool, CudaError> {
        // SAFETY: the event lives.
        match unsafe { sys::cuEventQuery(self.raw) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            result => check("cuEventQuery", result).map(|()| true),
        }
    }

    /// Milliseconds from `earlier`; both are done.
    pub(super) fn since_ms(&self, earlier: &Self) -> Result<f32, CudaError> {
        let mut milliseconds = 0.0;
        // SAFETY: both events live, and the pointer is to a live value of the right type.
        let result = unsafe { sys::cuEventElapsedTime_v2(&raw mut milliseconds, earlier.raw, self.raw) };
        check("cuEventElapsedTime", result)?;
        Ok(milliseconds)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made once by `new`, and ended once.
        log("cuEventDestroy", unsafe { sys::cuEventDestroy_v2(self.raw) });
    }
}

impl Module {
    /// Has the driver compile `ptx`.
    pub(super) fn load(context: &Context, ptx: &CStr) -> Result<Rc<Self>, CudaError> {
        let mut raw = ptr::null_mut();
        // SAFETY: the text ends with a zero, as PTX must.
        check("cuModuleLoadData", unsafe { sys::cuModuleLoadData(&raw mut raw, ptx.as_ptr().cast()) })?;
        Ok(Rc::new(Self { raw, _context: context.clone() }))
    }

    pub(super) fn kernel(self: &Rc<Self>, name: &str) -> Result<Kernel, CudaError> {
        let name = CString::new(name).unwrap_or_default();
        let mut raw = ptr::null_mut();
        // SAFETY: the module lives, the name ends with a zero, and the pointer is to a live value of the right type.
        let result = unsafe { sys::cuModuleGetFunction(&raw mut raw, self.raw, name.as_ptr()) };
        check("cuModuleGetFunction", result)?;
        Ok(Kernel { raw, _module: Rc::clone(self) })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: loaded once by `load`; kernels of it are gone, as they keep it.
        log("cuModuleUnload", unsafe { sys::cuModuleUnload(self.raw) });
    }
}

fn check(call: &'static str, result: CUresult) -> Result<(), CudaError> {
    if result == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let name = format!("{result:?}").trim_start_matches("CUDA_ERROR_").to_lowercase().replace('_', " ");
    Err(CudaError { call, code: result as u32, name })
}

fn beyond(call: &'static str) -> CudaError {
    CudaError { call, code: 1, name: "the allocation is smaller than the engine said".into() }
}

/// Logs a failure to free something, which nobody can repair.
fn log(call: &'static str, result: CUresult) {
    if let Err(error) = check(call, result) {
        tracing::warn!(%error, "the CUDA driver refused to free a resource");
    }
}

/// The number of the GPU at a place on the bus.
pub(super) fn ordinal_at(place: Option<PciPlace>) -> Result<u32, NoCuda> {
    check_library()?;
    let mut count = 0;
    // SAFETY: `check_library` found the functions; the pointers are to live values of the right types.
    unsafe {
        check("cuInit", sys::cuInit(0))?;
        check("cuDeviceGetCount", sys::cuDeviceGetCount(&raw mut count))?;
    }
    let Some(place) = place else {
        return if count > 0 { Ok(0) } else { Err(NoCuda::NoDevice { wanted: 0, found: 0 }) };
    };
    for ordinal in 0..count {
        let mut device = 0;
        // SAFETY: as above.
        check("cuDeviceGet", unsafe { sys::cuDeviceGet(&raw mut device, ordinal) })?;
        let found = PciPlace {
            domain: attribute_of(device, Attribute::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID)?,
            bus: attribute_of(device, Attribute::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID)?,
            device: attribute_of(device, Attribute::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID)?,
        };
        if found == place {
            return Ok(ordinal.cast_unsigned());
        }
    }
    Err(NoCuda::NotThere(place))
}

fn attribute_of(device: sys::CUdevice, attribute: sys::CUdevice_attribute) -> Result<u32, CudaError> {
    let mut value = 0;
    // SAFETY: the pointer is to a live value of the right type.
    let result = unsafe { sys::cuDeviceGetAttribute(&raw mut value, attribute, device) };
    check("cuDeviceGetAttribute", result)?;
    Ok(value.cast_unsigned())
}

/// Looks for every function, as calling one that is missing would panic.
pub(super) fn check_library() -> Result<(), NoCuda> {
    // SAFETY: loading the driver's library runs its initializers, which any program that uses CUDA runs.
    if !unsafe { sys::is_culib_present() } {
        return Err(NoCuda::NoLibrary);
    }
    for name in FUNCTIONS {
        // SAFETY: the symbol is not used, only looked for.
        if unsafe { sys::culib().get::<*const c_void>(name.as_bytes()) }.is_err() {
            return Err(NoCuda::TooOld(name));
        }
    }
    Ok(())
}

/// Locks; no code panics while it holds the lock.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The pinned pieces of memory of this process. Locked for a moment only: a driver that hangs holds up no other device.
static PINS: Mutex<BTreeMap<Piece, Arc<Mutex<usize>>>> = Mutex::new(BTreeMap::new());

/// All functions that this file calls.
const FUNCTIONS: [&str; 41] = [
    "cuInit",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetName",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxReset_v2",
    "cuCtxSetCurrent",
    "cuThreadExchangeStreamCaptureMode",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemGetAddressRange_v2",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemHostGetDevicePointer_v2",
    "cuIpcOpenMemHandle_v2",
    "cuIpcCloseMemHandle",
    "cuMemImportFromShareableHandle",
    "cuMemAddressReserve",
    "cuMemAddressFree",
    "cuMemMap",
    "cuMemUnmap",
    "cuMemRelease",
    "cuMemSetAccess",
    "cuStreamCreateWithPriority",
    "cuStreamDestroy_v2",
    "cuStreamWaitEvent",
    "cuStreamSynchronize",
    "cuStreamWriteValue32_v2",
    "cuMemcpyAsync",
    "cuMemcpyBatchAsync_v2",
    "cuLaunchKernel",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventElapsedTime_v2",
    "cuModuleLoadData",
    "cuModuleGetFunction",
    "cuModuleUnload",
];

// CU_STREAM_NON_BLOCKING, CU_MEMHOSTREGISTER_*, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE of
// cuda.h.
const NON_BLOCKING: u32 = 1;
const PORTABLE: u32 = 1;
const DEVICE_MAP: u32 = 2;
const READ_ONLY: u32 = 8;
const LAZY_PEER_ACCESS: u32 = 1;
const BESIDE_COMPUTATION: u32 = 1;

/// Before all priorities of the driver: a kernel of a copy waits for running thread blocks of the engine's kernels, and not for
/// those that have not begun.
const FIRST: i32 = -1_000;
