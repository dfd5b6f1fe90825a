// On a simulated GPU a launch returns when its blocks have ended.
#include "side_stream.h"

namespace flash_attn::cuda {

SideStream::SideStream(Stream main) : main_(main), kept_(nullptr) {}
SideStream::~SideStream() = default;
Stream SideStream::stream() const { return main_; }
void SideStream::join() { is_joined_ = true; }

}  // namespace flash_attn::cuda
