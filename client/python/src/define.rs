//! Makes two Python classes from one definition of a session's requests, and the text of classes.

/// Makes `Session`, for threads, and `AsyncSession`, for asyncio, from the given requests. Each request is a method of [`Open`]
/// that checks Python's arguments. `client/python/stub` takes the types of the stub file from the signatures.
///
/// [`Open`]: crate::open::Open
macro_rules! sessions {
    ($(
        $(#[doc = $doc:tt])*
        #[pyo3($($signature:tt)*)]
        fn $name:ident(&$this:ident $(, $argument:ident: $type:ty)* $(,)?) -> $result:ty $body:block
    )*) => {
        #[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
        impl Open {
            $(fn $name(&$this $(, $argument: $type)*) -> PyResult<impl Request<$result> + use<>> $body)*
        }

        sessions! {
            @class Session, Thread, new -> Self, __enter__, __exit__, new;
            $($(#[doc = $doc])* #[pyo3($($signature)*)] fn $name($($argument: $type),*);)*
        }
        sessions! {
            @class AsyncSession, Task, staticmethod -> Bound<'py, PyAny>, __aenter__, __aexit__, connect;
            $($(#[doc = $doc])* #[pyo3($($signature)*)] fn $name($($argument: $type),*);)*
        }
    };

    (
        @class $class:ident, $way:ident, $kind:ident -> $opened:ty, $enter:ident, $exit:ident, $open:ident;
        $($(#[doc = $doc:tt])* #[pyo3($($signature:tt)*)] fn $name:ident($($argument:ident: $type:ty),*);)*
    ) => {
        #[pymethods]
        #[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
        impl $class {
            #[$kind]
            #[pyo3(signature = (
                path: "str | PathLike[str]", *, client: "str | None" = None, device: "int | None" = None,
                window_bytes: "int" = 64 << 20, timeout: "float" = 10.0, verify: "_Verify" = String::from("sample"),
                verify_seed: "int | None" = None, copy_threads: "int" = 0))]
            fn $open<'py>(
                py: Python<'py>,
                path: PathBuf,
                client: Option<String>,
                device: Option<u16>,
                window_bytes: u64,
                timeout: f64,
                verify: String,
                verify_seed: Option<u64>,
                copy_threads: usize,
            ) -> PyResult<$opened> {
                Self::open(py, Opening { path, client, device, window_bytes, timeout, verify, verify_seed, copy_threads })
            }

            $(
                $(#[doc = $doc])*
                #[pyo3($($signature)*)]
                fn $name<'py>(&self, py: Python<'py>, $($argument: $type),*) -> PyResult<Bound<'py, PyAny>> {
                    $way::answer(py, self.open.runtime(), self.open.$name($($argument),*)?)
                }
            )*

            /// The tenant that the socket serves.
            #[getter]
            fn tenant(&self) -> PyResult<String> {
                Ok(self.open.session()?.tenant().to_owned())
            }

            /// The node's name.
            #[getter]
            fn node(&self) -> PyResult<String> {
                Ok(self.open.session()?.node().to_owned())
            }

            /// Number of the GPU actor that serves the session.
            #[getter]
            fn device(&self) -> PyResult<u16> {
                Ok(self.open.session()?.device())
            }

            /// Bytes of the session's write window; 0 if it has none.
            #[getter]
            fn window_bytes(&self) -> PyResult<u64> {
                Ok(self.open.session()?.window_bytes())
            }

            /// Whether the session goes on: False once it was closed, or its node has stopped or ended it. A node that does not
            /// answer ends no session.
            #[getter]
            fn is_open(&self) -> PyResult<bool> {
                self.open.is_open()
            }

            /// Bytes that the session has copied so far.
            fn stats(&self) -> PyResult<Stats> {
                Ok(self.open.session()?.counters().into())
            }

            /// Lets the session go, at once and without waiting. Leases, tickets and reservations keep it open until they are gone.
            fn close(&self) -> PyResult<()> {
                self.open.close()
            }

            fn $enter<'py>(slf: Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
                $way::known(slf.into_any())
            }

            #[pyo3(signature = (*_error))]
            fn $exit<'py>(&self, py: Python<'py>, _error: &Bound<'py, PyTuple>) -> PyResult<Bound<'py, PyAny>> {
                self.open.close()?;
                $way::known(py.None().into_bound(py))
            }

            fn __repr__(&self) -> String {
                let class = stringify!($class);
                match self.open.session() {
                    Ok(session) => format!("<larder_kv.{class} with {}>", session.node()),
                    Err(_) => format!("<larder_kv.{class}, closed or of another process>"),
                }
            }
        }
    };
}

/// Gives a class the text `Class(field=value, ...)`.
macro_rules! repr {
    ($class:ident($first:ident $(, $field:ident)*)) => {
        #[pymethods]
        impl $class {
            fn __repr__(&self) -> String {
                format!(
                    concat!(stringify!($class), "(", stringify!($first), "={}" $(, ", ", stringify!($field), "={}")*, ")"),
                    self.$first $(, self.$field)*
                )
            }
        }
    };
}
