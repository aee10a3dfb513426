//! The times at which a device passes marks.
use super::Buf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Most marks of a submission.
pub const MAX_MARKS: u32 = 64;
/// What the clock needs.
pub const CLOCK: wgpu::Features =
    wgpu::Features::TIMESTAMP_QUERY.union(wgpu::Features::TIMESTAMP_QUERY_INSIDE_ENCODERS);

/// The times of marks on their way to the host.
#[derive(Clone, Debug)]
pub struct Clock {
    pub queries: wgpu::QuerySet,
    pub resolved: wgpu::Buffer,
    pub staging: Arc<Buf>,
}

impl Clock {
    pub fn new(device: &wgpu::Device) -> Self {
        let buffer = |usage| {
            device.create_buffer(&wgpu::BufferDescriptor {
                label: Some("times"),
                size: 8 * u64::from(MAX_MARKS),
                usage,
                mapped_at_creation: false,
            })
        };
        let staging = buffer(wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST);
        Clock {
            queries: device.create_query_set(&wgpu::QuerySetDescriptor {
                label: Some("times"),
                ty: wgpu::QueryType::Timestamp,
                count: MAX_MARKS,
            }),
            resolved: buffer(wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC),
            staging: Arc::new(Buf {
                raw: staging,
                id: 0,
                bind_groups: Arc::default(),
                is_bound: AtomicBool::new(false),
            }),
        }
    }
}
