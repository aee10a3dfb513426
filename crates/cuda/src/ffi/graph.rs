//! Graphs: launches that the driver gets once, and that the device then starts by itself, one after the other.
//!
//! They are made node by node, because the parameters are at hand, and their nodes get other parameters between launches. What is here
//! exists since CUDA 12.0. A driver without it works without graphs.
//!
//! Launches of a graph may overlap (programmatic dependent launch): the device starts the blocks of one while the last blocks of the one
//! before still run. Every kernel of this crate begins with a wait until everything before it has ended, so all that overlaps is the
//! way to the first instruction, which takes about as long as a small kernel.
use super::context::{Context, Launch, Stream};
use super::{Code, Handle, check};
use libloading::Library;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;

/// `CUDA_KERNEL_NODE_PARAMS_v2`.
#[repr(C)]
struct NodeParameters {
    function: Handle,
    groups: [c_uint; 3],
    threads: [c_uint; 3],
    shared_bytes: c_uint,
    arguments: *mut *mut c_void,
    extra: *mut *mut c_void,
    /// Instead of a function.
    kernel: Handle,
    /// Of such a kernel.
    context: Handle,
}

const _: () =
    assert!(size_of::<NodeParameters>() == 72 && std::mem::offset_of!(NodeParameters, arguments) == 40);

/// `CUgraphEdgeData` of launches that overlap: from the kernel's programmatic port (1), to all of the next (0), a programmatic
/// dependency (1).
const OVERLAPPING: [u8; 8] = [1, 0, 1, 0, 0, 0, 0, 0];

macro_rules! functions {
    ($(#[$doc:meta])* $name:ident { $($function:ident($($kind:ty),*);)* }) => {
        $(#[$doc])*
        #[allow(non_snake_case)] // the names of the C API
        pub(super) struct $name {
            $($function: unsafe extern "C" fn($($kind),*) -> c_int,)*
        }
        impl $name {
            /// `None` if the library lacks one of them. They may be called while it is loaded.
            #[allow(non_snake_case)]
            pub(super) fn find(library: &Library) -> Option<Self> {
                // SAFETY: the types are those of the API's headers, which never change for a symbol. The context has the pointers,
                // and keeps the library loaded.
                $(let $function = unsafe {
                    *library.get(concat!(stringify!($function), "\0").as_bytes()).ok()?
                };)*
                Some($name { $($function,)* })
            }
        }
    };
}

functions! {
    GraphCalls {
        cuGraphCreate(*mut Handle, c_uint);
        cuGraphAddKernelNode_v2(*mut Handle, Handle, *const Handle, usize, *const NodeParameters);
        cuGraphInstantiateWithFlags(*mut Handle, Handle, u64);
        cuGraphExecKernelNodeSetParams_v2(Handle, Handle, *const NodeParameters);
        cuGraphLaunch(Handle, Handle);
        cuGraphExecDestroy(Handle);
        cuGraphDestroy(Handle);
    }
}

functions! {
    /// Since CUDA 12.3.
    EdgeCalls {
        cuGraphAddDependencies_v2(Handle, *const Handle, *const Handle, *const [u8; 8], usize);
    }
}

/// Launches, each after the one before it. Destroyed when dropped; the driver lets one that runs come to its end.
#[derive(Debug)]
pub struct Graph {
    context: Arc<Context>,
    raw: Handle,
    /// What is launched.
    executable: Handle,
    /// In order.
    nodes: Vec<Handle>,
}

// SAFETY: the driver does not lock graphs, but any thread may use one as long as no other does, and every method takes `&mut self`. All
// else as `Context`.
unsafe impl Send for Graph {}
// SAFETY: as above: there is nothing to do with a `&Graph`.
unsafe impl Sync for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        if let (Ok(_), Some(calls)) = (self.context.enter(), &self.context.graphs) {
            // SAFETY: the handles are this value's alone. Null is one that was never made.
            unsafe {
                if !self.executable.is_null() {
                    (calls.cuGraphExecDestroy)(self.executable);
                }
                if !self.raw.is_null() {
                    (calls.cuGraphDestroy)(self.raw);
                }
            }
        }
    }
}

/// Calls `set` with the parameters of a node, which the driver copies.
fn with_parameters(
    launch: &Launch<'_>,
    set: impl FnOnce(*const NodeParameters) -> c_int,
) -> Result<(), Code> {
    let mut arguments = launch.arguments()?;
    let parameters = NodeParameters {
        function: launch.function.raw,
        groups: launch.groups,
        threads: [launch.threads, 1, 1],
        shared_bytes: launch.shared_bytes,
        arguments: arguments.as_mut_ptr(),
        extra: std::ptr::null_mut(),
        kernel: std::ptr::null_mut(),
        context: std::ptr::null_mut(),
    };
    check(set(&parameters))
}

impl Context {
    /// Whether the driver has graphs.
    pub fn has_graphs(&self) -> bool {
        self.graphs.is_some()
    }

    /// Whether launches of its graphs can overlap, if the device can do that too.
    pub fn has_overlap(&self) -> bool {
        self.edges.is_some()
    }

    /// A graph of these launches. The caller keeps their functions loaded. With `overlap` every kernel waits for the one before by itself.
    pub fn graph<'a>(
        self: &Arc<Self>,
        launches: impl ExactSizeIterator<Item = Launch<'a>>,
        overlap: bool,
    ) -> Result<Graph, Code> {
        self.enter()?;
        let calls = self.graphs.as_ref().ok_or(Code::NOT_SUPPORTED)?;
        let null = std::ptr::null_mut();
        let nodes = Vec::with_capacity(launches.len());
        let mut graph = Graph { context: self.clone(), raw: null, executable: null, nodes };
        // SAFETY: the driver writes one handle; there are no flags.
        check(unsafe { (calls.cuGraphCreate)(&mut graph.raw, 0) })?;
        let edges = self.edges.as_ref().filter(|_| overlap);
        for launch in launches {
            let before = graph.nodes.last().map_or(std::ptr::null(), std::ptr::from_ref);
            let n_before = usize::from(!before.is_null());
            let mut node = null;
            let n = if edges.is_some() { 0 } else { n_before };
            // SAFETY: the graph and the node before exist. The driver writes one handle, and copies as many arguments as the kernel has, as
            // in `Stream::launch`.
            with_parameters(&launch, |parameters| unsafe {
                (calls.cuGraphAddKernelNode_v2)(&mut node, graph.raw, before, n, parameters)
            })?;
            if let Some(edges) = edges.filter(|_| n_before > 0) {
                // SAFETY: the graph and both nodes exist, and the edge is one of those that the header defines.
                check(unsafe {
                    (edges.cuGraphAddDependencies_v2)(graph.raw, before, &node, &OVERLAPPING, n_before)
                })?;
            }
            graph.nodes.push(node);
        }
        // SAFETY: the graph exists, and the driver writes one handle; no flags.
        check(unsafe { (calls.cuGraphInstantiateWithFlags)(&mut graph.executable, graph.raw, 0) })?;
        Ok(graph)
    }
}

impl Graph {
    /// Gives launch `i` other arguments and groups, from the graph's next launch on. Its function stays the same.
    pub fn set(&mut self, i: usize, launch: &Launch<'_>) -> Result<(), Code> {
        self.context.enter()?;
        let calls = self.context.graphs.as_ref().ok_or(Code::NOT_SUPPORTED)?;
        let node = *self.nodes.get(i).ok_or(Code(1))?;
        // SAFETY: the executable graph was made of the graph that the node is in, and both exist. The driver copies as many arguments as
        // the kernel has, as in `Stream::launch`.
        with_parameters(launch, |parameters| unsafe {
            (calls.cuGraphExecKernelNodeSetParams_v2)(self.executable, node, parameters)
        })
    }
}

impl Stream {
    /// Launches a graph. The buffers that its launches name outlive that, as in [`Stream::launch`].
    pub fn launch_graph(&self, graph: &mut Graph) -> Result<(), Code> {
        self.context.enter()?;
        let calls = self.context.graphs.as_ref().ok_or(Code::NOT_SUPPORTED)?;
        // SAFETY: graph and stream exist. The driver orders launches of a graph one after the other.
        check(unsafe { (calls.cuGraphLaunch)(graph.executable, self.raw) })
    }
}
